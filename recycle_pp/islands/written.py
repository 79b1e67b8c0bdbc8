"""The objects that a worker writes, as (path, content): deltas, checksums and snapshots of its units.

    for path, content in deltas("oregon", 12, share, contents): ...     # contents: unit -> its part of an object
    for path, content in checksums("oregon", 12, units, theta): ...     # theta: a function of the unit
    for path, content in snapshot(12, outer): ...                       # outer: unit -> its state after 12 rounds

An object holds neighbouring units of one layer (`objects`). Its size is limited, because objects are written and read
as a whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping

from recycle_pp.wire.messages.units import UnitId

from . import objects
from .codec import Floats
from .rounds import Share
from .theta import Outer

MOST = 16 << 20  # bytes of an object, unless it has a single unit
Written = tuple[str, bytes]


def deltas(island: str, number: int, share: Share, contents: Mapping[UnitId, bytes]) -> Iterator[Written]:
    """An island's deltas of a round. contents: unit -> the unit's part of an object, see `codec.seal`"""
    for run in runs({unit: len(content) for unit, content in contents.items()}):
        content = b"".join(contents[unit] for unit in run)
        yield objects.delta_path(number, island, _part(run), share.steps, share.samples, len(content)), content


def checksums(
    island: str, number: int, units: Collection[UnitId], theta: Callable[[UnitId], Floats]
) -> Iterator[Written]:
    """SHA-256 of theta of these units after a round."""
    for run in runs(dict.fromkeys(units, 0)):
        sums = [hashlib.sha256(theta(unit).astype("<f4").tobytes()).hexdigest() for unit in run]
        yield objects.sums_path(number, island, _part(run)), json.dumps(sums).encode()


def snapshot(rounds: int, outer: Mapping[UnitId, Outer]) -> Iterator[Written]:
    """Theta and momentum of these units after a number of rounds."""
    for run in runs({unit: 8 * of.theta.size for unit, of in outer.items()}):
        vectors = [vector for unit in run for vector in (outer[unit].theta, outer[unit].momentum)]
        content = b"".join(vector.astype("<f4").tobytes() for vector in vectors)
        yield objects.state_path(rounds, _part(run), len(content)), content


def runs(sizes: Mapping[UnitId, int]) -> list[list[UnitId]]:
    """The units as runs of neighbours in a layer, each of at most MOST bytes, but at least one unit. sizes: in bytes"""
    found: list[list[UnitId]] = []
    total = 0
    for unit in sorted(sizes):
        last = found[-1][-1] if found else None
        total += sizes[unit]
        if last != UnitId(unit.layer, unit.number - 1) or total > MOST:
            found.append([])
            total = sizes[unit]
        found[-1].append(unit)
    return found


def _part(run: list[UnitId]) -> tuple[int, int, int]:
    return run[0].layer, run[0].number, run[-1].number
