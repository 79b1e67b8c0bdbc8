"""The objects of islands in their store, and the state of the rounds according to a listing of the store.

    run.json                                        the settings that all islands share
    numbers/002                                     the name of the island that has part 2 of the data
    layout/3.14.DIGEST                              layer 3 has 14 units; DIGEST identifies their names and sizes
    weights/3                                       digest of the initial weights of layer 3
    islands/oregon.json                             a lease: written again every RENEW_SECONDS while the island runs
    rounds/000012/oregon/3.0-13.1200.6400.BYTES.delta     units 0 to 13 of layer 3, cut after 1200 steps, from 6400
                                                    samples; BYTES is the size of the object
    rounds/000012/closed.json                       the islands in the round; created once, only if absent
    rounds/000012/oregon/3.0-13.sums                SHA-256 of theta after the round, for each of these units
    past/oregon                                     the island was in rounds whose objects have been deleted
    theta/000010/3.0-13.BYTES.state                 theta and momentum after 10 rounds

    view = View.of(store.objects(), fragments=1)
    view.delivered[12]["oregon"]                    # Delivery(steps=1200, samples=6400, objects=[...])

The names contain everything that decides a round. So a listing is enough to judge a round, without reading objects.
Objects with other names, and deltas and states whose size is not the one in their name, are ignored. Pure: no store, no
clock.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from .fragments import takes_part

NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}"  # name of an island
RUN = "run.json"
LAYOUT = "layout"
_UNITS = r"(?P<layer>-?\d+)\.(?P<first>\d+)-(?P<last>\d+)"
_DELTA = re.compile(
    rf"rounds/(?P<round>\d{{6}})/(?P<island>{NAME})/{_UNITS}\.(?P<steps>\d+)\.(?P<samples>\d+)\.(?P<bytes>\d+)\.delta"
)
_CLOSED = re.compile(r"rounds/(?P<round>\d{6})/closed\.json")
_STATE = re.compile(rf"theta/(?P<round>\d{{6}})/{_UNITS}\.(?P<bytes>\d+)\.state")
_SUMS = re.compile(rf"rounds/(?P<round>\d{{6}})/(?P<island>{NAME})/{_UNITS}\.sums")
_LAYOUT = re.compile(r"layout/(?P<layer>-?\d+)\.(?P<units>\d+)\.(?P<digest>[0-9a-f]{32})")
_LEASE = re.compile(rf"islands/(?P<island>{NAME})\.json")
_ROUND = re.compile(r"(?:rounds|theta)/(?P<round>\d{6})/.*")


class Seen(Protocol):
    """An object in a listing, such as `storage.store.Object`."""

    @property
    def size(self) -> int: ...
    @property
    def modified(self) -> float: ...


class Part(NamedTuple):
    """An object with the units `first` to `last` of a layer."""

    path: str
    layer: int
    first: int
    last: int

    def units(self) -> range:
        return range(self.first, self.last + 1)


@dataclass(frozen=True)
class Delivery:
    """A complete delta of an island in one round.

    steps    number of steps of the island at which it was cut
    samples  number of samples that it was trained on
    parts    its objects, which hold every unit of the layers that the round synchronises
    """

    steps: int
    samples: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class View:
    """The state of the rounds, according to a listing of the store.

    layout     layer -> number of its units
    digests    layer -> digests of its units; more than one if islands have different models
    fragments  islands.fragments
    delivered  round -> island -> its complete delta, the oldest one if there are several
    complete   round -> island -> all its complete deltas. There can be several: an island that has lost a delta cuts
               another one, but the upload of the lost one may have been completed
    partial    (round, island) of each delta that is not complete
    closed     rounds that are closed
    snapshots  number of rounds -> objects of a complete snapshot of theta after them
    sums       round -> island -> objects with checksums of theta
    leases     island -> time of its latest renewal, by the store's clock
    """

    layout: Mapping[int, int] = field(default_factory=dict)
    digests: Mapping[int, set[str]] = field(default_factory=dict)
    fragments: int = 1
    delivered: Mapping[int, Mapping[str, Delivery]] = field(default_factory=dict)
    complete: Mapping[int, Mapping[str, tuple[Delivery, ...]]] = field(default_factory=dict)
    partial: set[tuple[int, str]] = field(default_factory=set)
    closed: set[int] = field(default_factory=set)
    snapshots: Mapping[int, tuple[Part, ...]] = field(default_factory=dict)
    sums: Mapping[int, Mapping[str, tuple[Part, ...]]] = field(default_factory=dict)
    leases: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, listing: Mapping[str, Seen], fragments: int) -> View:
        """listing: path -> object. fragments: islands.fragments"""
        layout: dict[int, int] = {}
        digests: dict[int, set[str]] = {}
        deltas: dict[tuple[int, str], dict[tuple[int, int], list[Part]]] = {}
        states: dict[int, list[Part]] = {}
        sums: dict[int, dict[str, tuple[Part, ...]]] = {}
        closed, leases = set(), {}
        for path, seen in sorted(listing.items()):
            if found := _DELTA.fullmatch(path):
                if seen.size == int(found["bytes"]):
                    kinds = deltas.setdefault((int(found["round"]), found["island"]), {})
                    kinds.setdefault((int(found["steps"]), int(found["samples"])), []).append(_part(found))
            elif found := _STATE.fullmatch(path):
                if seen.size == int(found["bytes"]):
                    states.setdefault(int(found["round"]), []).append(_part(found))
            elif found := _SUMS.fullmatch(path):
                of = sums.setdefault(int(found["round"]), {})
                of[found["island"]] = (*of.get(found["island"], ()), _part(found))
            elif found := _CLOSED.fullmatch(path):
                closed.add(int(found["round"]))
            elif found := _LAYOUT.fullmatch(path):
                layout[int(found["layer"])] = int(found["units"])
                digests.setdefault(int(found["layer"]), set()).add(found["digest"])
            elif found := _LEASE.fullmatch(path):
                leases[found["island"]] = seen.modified
        complete: dict[int, dict[str, tuple[Delivery, ...]]] = {}
        partial = set()
        for (number, island), kinds in deltas.items():
            needed = of_round(layout, number, fragments)
            whole = [Delivery(*key, tuple(parts)) for key, parts in sorted(kinds.items()) if covers(parts, needed)]
            if whole:
                complete.setdefault(number, {})[island] = tuple(whole)
            else:
                partial.add((number, island))
        snapshots = {number: tuple(parts) for number, parts in states.items() if covers(parts, layout)}
        delivered = {number: {name: deltas_[0] for name, deltas_ in of.items()} for number, of in complete.items()}
        return cls(layout, digests, fragments, delivered, complete, partial, closed, snapshots, sums, leases)

    def delivery(self, number: int, island: str, share: tuple[int, int]) -> Delivery | None:
        """The island's delta in a closed round; None if it is not complete in the listing. share: steps and samples"""
        of = self.complete.get(number, {}).get(island, ())
        return next((each for each in of if (each.steps, each.samples) == share), None)


def of_round(layout: Mapping[int, int], number: int, fragments: int) -> dict[int, int]:
    """The part of `View.layout` that a round synchronises."""
    return {layer: units for layer, units in layout.items() if takes_part(layer, number, fragments)}


def covers(parts: Iterable[Part], layout: Mapping[int, int]) -> bool:
    """Whether the parts hold all units. layout: layer -> number of its units; if it is empty, returns False"""
    held: dict[int, set[int]] = {}
    for part in parts:
        held.setdefault(part.layer, set()).update(part.units())
    return bool(layout) and all(held.get(layer, set()) >= set(range(units)) for layer, units in layout.items())


def holding(parts: Iterable[Part], layer: int, unit: int) -> Part | None:
    """The part with this unit, or None."""
    return next((part for part in parts if part.layer == layer and unit in part.units()), None)


def delta_path(number: int, island: str, part: tuple[int, int, int], steps: int, samples: int, size: int) -> str:
    """part: layer, first unit, last unit. size: bytes of the object"""
    layer, first, last = part
    return f"rounds/{number:06d}/{island}/{layer}.{first}-{last}.{steps}.{samples}.{size}.delta"


def sums_path(number: int, island: str, part: tuple[int, int, int]) -> str:
    return f"rounds/{number:06d}/{island}/{part[0]}.{part[1]}-{part[2]}.sums"


def state_path(rounds: int, part: tuple[int, int, int], size: int) -> str:
    return f"theta/{rounds:06d}/{part[0]}.{part[1]}-{part[2]}.{size}.state"


def closed_path(number: int) -> str:
    return f"rounds/{number:06d}/closed.json"


def layout_path(layer: int, units: int, digest: bytes) -> str:
    return f"{LAYOUT}/{layer}.{units}.{digest.hex()}"


def weights_path(layer: int) -> str:
    return f"weights/{layer}"


def lease_path(island: str) -> str:
    return f"islands/{island}.json"


def past_path(island: str) -> str:
    return f"past/{island}"


def owner(run_dir: str) -> str:
    """Identifies the job that holds a lease: 16 hexadecimal digits, the same for all starts of a run in this folder."""
    return hashlib.sha256(run_dir.encode()).hexdigest()[:16]


def owner_in(lease: bytes) -> str | None:
    """The owner in the content of a lease; None if it is damaged."""
    try:
        return str(json.loads(lease)["owner"])
    except (ValueError, KeyError, TypeError):
        return None


def number_path(number: int) -> str:
    return f"numbers/{number:03d}"


def round_of(path: str) -> int | None:
    """The number of rounds in the path of an object of a round or of a snapshot; None for other objects."""
    found = _ROUND.fullmatch(path)
    return int(found["round"]) if found else None


def _part(found: re.Match[str]) -> Part:
    return Part(found.string, int(found["layer"]), int(found["first"]), int(found["last"]))
