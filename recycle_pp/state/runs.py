"""Units that travel together.

    runs = runs_of(shares.holders, spans)
    for runs in rounds(runs, peers): ...             # of each peer the first run that it sums, then the second, ...

Neighbouring units with the same holders are one `Run`, of at most `BUCKET` elements unless a unit has more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

BUCKET = 1 << 20


@dataclass(frozen=True)
class Run:
    """Neighbouring units with the same holders, the first of which sums them; span: their elements."""

    units: range
    holders: list[int]
    span: slice

    def pieces(self, size: int) -> list[slice]:
        starts = range(self.span.start, self.span.stop, size)
        return [slice(start, min(start + size, self.span.stop)) for start in starts]


def runs_of(table: Sequence[list[int]], spans: Sequence[slice]) -> list[Run]:
    """table: the holders of each unit; spans: its elements."""
    found, first = [], 0
    for unit, holders in enumerate(table):
        following = unit + 1
        if (
            following == len(table)
            or table[following] != holders
            or spans[following].stop - spans[first].start > BUCKET
        ):
            found.append(Run(range(first, following), holders, slice(spans[first].start, spans[unit].stop)))
            first = following
    return found


def rounds(runs: Sequence[Run], peers: Sequence[int]) -> Iterator[tuple[Run | None, ...]]:
    """Each in the order of the peers; None for one that has no more."""
    by_peer: dict[int, list[Run]] = {peer: [] for peer in peers}
    for run in runs:
        by_peer[run.holders[0]].append(run)
    return zip_longest(*by_peer.values())
