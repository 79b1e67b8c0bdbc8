"""Runs: consecutive units that are sent together.

    runs = runs_of([*shares.holders.values()], stage.layout)
    for runs in rounds(runs, peers): ...             # the first run of each peer, then the second, ...

Consecutive units of a layer with the same holders form a `Run`. A run has at most `BUCKET` elements, unless a single
unit has more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from recycle_pp.numerics.layout import Layout
from recycle_pp.wire.messages.members import Member

BUCKET = 1 << 20  # elements


@dataclass(frozen=True)
class Run:
    """Consecutive units of a layer with the same holders. The first holder sums their gradients.

    span: the slice of the stage's vector (`numerics.layout`) that contains the units
    """

    units: range
    holders: list[Member]
    span: slice

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.span.stop - self.span.start

    def pieces(self, size: int) -> list[slice]:
        starts = range(self.span.start, self.span.stop, size)
        return [slice(start, min(start + size, self.span.stop)) for start in starts]


def runs_of(table: Sequence[list[Member]], layout: Layout) -> list[Run]:
    """Groups units into runs. table: the holders of each unit."""
    found, spans = [], layout.spans
    for layer in layout.layers.values():
        first = layer.start
        for unit in layer:
            following = unit + 1
            if (
                following == layer.stop
                or table[following] != table[first]
                or spans[following].stop - spans[first].start > BUCKET
            ):
                units = range(first, following)
                found.append(Run(units, table[first], layout.span(units)))
                first = following
    return found


def rounds(runs: Sequence[Run], peers: Sequence[Member]) -> Iterator[tuple[Run | None, ...]]:
    """Yields rounds. A round has one entry for each peer, in the order of `peers`: the next run that the peer sums as
    first holder, or None if there is none."""
    by_peer: dict[Member, list[Run]] = {peer: [] for peer in peers}
    for run in runs:
        by_peer[run.holders[0]].append(run)
    return zip_longest(*by_peer.values())
