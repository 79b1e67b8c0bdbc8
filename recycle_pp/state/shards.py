"""What the workers of a stage send each other where each holds only some blocks of its optimizer state.

    exchange = Exchange(links, stage, optimizer, me, wait)
    exchange.exponents(source)                       # a generation begins, and somebody is new
    exchange.copies(shares, took)                    # what this worker has to hold, from those who do
    reduced = exchange.reduce(shares, peers, sent)   # its blocks' gradients: summed by the first holder, given to all
    exchange.weights(shares, peers, ...)             # after the update: each block from its first holder
    exchange.masters(shares, peers)                  # every tensor whole, one after the other

All peers call the same, in the same order, with the same `Shares`; everything blocks, and ends with LinkBroken when the
generation does. Neighbouring blocks of the same holders go as one message, of `BUCKET` elements at most. In `reduce`
each first holder takes `PIECE` elements of it from every peer at a time, so that it needs memory for these and not for
a second set of sums: the accumulators are sent from where they are, and stay as they are. A peer may be a piece ahead,
not more: it waits for its own.

Messages of one kind between two workers match in the order in which both ask for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import prod

import torch
from recycle_schedules import Worker
from torch import Tensor

from recycle_pp.comm.links import Links
from recycle_pp.comm.tcp.transport import MAX_TAG
from recycle_pp.comm.waiting import Pending
from recycle_pp.model.stage import Stage
from recycle_pp.numerics.gradients import Reduced
from recycle_pp.numerics.shards import ShardedOptimizer
from recycle_pp.wire.messages.workers import Shares

from .tied_blocks import TiedBlocks, Wait

BUCKET = 1 << 20  # elements of a message, unless a block has more
PIECE = 1 << 18  # elements of one of sums
AHEAD = 8  # copies that a worker takes at a time
SUMS, GRADIENTS, STATE, WEIGHTS, MASTERS = range(MAX_TAG - 5, MAX_TAG)  # no mailbox counts so far


@dataclass(frozen=True)
class Run:
    """Neighbouring blocks that have the same holders; span: their elements."""

    blocks: range
    holders: list[int]
    span: slice

    @property
    def pieces(self) -> list[slice]:
        starts = range(self.span.start, self.span.stop, PIECE)
        return [slice(start, min(start + PIECE, self.span.stop)) for start in starts]


class Exchange:
    """wait(pending, giver): waits for a message, saying so to whoever watches. giver: if it is of another stage."""

    def __init__(self, links: Links, stage: Stage, optimizer: ShardedOptimizer, me: Worker, wait: Wait) -> None:
        self._links, self._stage, self._optimizer = links, stage, optimizer
        self._me, self._wait = me.pipeline, wait
        self._worker = {d: Worker(d, me.stage) for d in range(stage.settings.parallel.pipelines)}
        self._spans = stage.layout.spans
        self.tied = TiedBlocks(links, stage, optimizer, me, wait)
        self._cut: tuple[Shares | None, list[Run]] = None, []  # the runs of these shares

    def exponents(self, source: int) -> None:
        """Everybody has those of that peer."""
        gradients = self._stage.gradients
        if gradients.reproducible:
            tensor = gradients.exponents.clone()  # an aborted broadcast may write to it
            self._wait(self._links.broadcast([tensor], self._worker[source]))
            gradients.take_exponents(tensor)

    def copies(self, shares: Shares, took: Callable[[int], None]) -> None:
        """`took(block)` after each block that came."""
        coming: list[tuple[int, list[Tensor], list[Pending]]] = []
        for block, source, to in shares.copies:
            if source == self._me:
                for tensor in self._optimizer.given(block):
                    self._links.send(tensor, self._worker[to], STATE)
            if to == self._me:
                room = self._optimizer.room(block)
                coming.append((block, room, [self._links.receive(t, self._worker[source], STATE) for t in room]))
            if len(coming) >= AHEAD:
                self._take(*coming.pop(0), took)
        for each in coming:
            self._take(*each, took)

    def reduce(self, shares: Shares, peers: Sequence[int], sent: Callable[[], None]) -> Reduced:
        """Every block's gradient on all its holders (`optimizer.shards[block].grad`), and what all peers know of it;
        but for what other stages hold as well: there each first holder has its stage's sums (`tied.unite`).

        sent(): called when this worker has sent its first sums.
        """
        gradients, tied = self._stage.gradients, set(self.tied.blocks)
        mine = [block for block, holders in enumerate(shares.holders) if self._me in holders]
        self._optimizer.start_step(mine, [block for block in mine if shares.holders[block][0] == self._me])
        forwarded = [
            self._links.receive(self._optimizer.gradient(block), self._worker[shares.holders[block][0]], GRADIENTS)
            for block in mine
            if shares.holders[block][0] != self._me and block not in tied
        ]
        own: dict[int, Tensor] = {}
        sums, counts = gradients.sums(), gradients.largest_counts
        squares = torch.zeros(len(self._spans), dtype=torch.float64, device=self._stage.device)
        largest = torch.zeros(sum(counts), device=self._stage.device)
        places = largest.split(counts)
        rooms = {peer: torch.empty(PIECE, dtype=sums.dtype, device=sums.device) for peer in peers if peer != self._me}
        for runs in self._rounds(shares, peers):
            run = runs[list(peers).index(self._me)]
            total = self._summed(sums, dict(zip(peers, runs, strict=True)), rooms, sent)
            sent = lambda: None  # noqa: E731
            if run is None:
                continue
            for block in run.blocks:
                span = self._spans[block]
                part = total[span.start - run.span.start : span.stop - run.span.start]
                if block in tied:
                    own[block] = part.clone()
                    continue
                grad = self._optimizer.restore(block, part)
                squares[block] = self._optimizer.squares(block, grad).item()
                if counts[block]:
                    places[block].copy_(self._optimizer.largest(block, grad))
                for holder in shares.holders[block][1:]:
                    self._links.send(grad, self._worker[holder], GRADIENTS)
        book = gradients.book()
        self._wait(self._links.all_reduce([book, squares, largest]))
        for pending in forwarded:
            self._wait(pending)
        nothing = torch.empty(0, device=self._stage.device)
        return gradients.concluded(nothing, book, squares.tolist(), shared=self.tied.own(own), largest=largest)

    def weights(self, shares: Shares, peers: Sequence[int], ahead: bool, known: bool) -> None:
        """What is computed with, whole, on every peer.

        In place: what an aborted one may still write is the same. ahead: of an update that may be undone; what came is
        copied, or a message that is late could change weights that have been sent again since. known: this worker has
        them already, and micro-batches in flight that autograd has noted their version for.
        """
        working = self._stage.working.data
        before: list[tuple[Pending, Tensor, Tensor]] = []
        for runs in [*self._rounds(shares, peers), ()]:
            coming = []
            for run in filter(None, runs):
                if run.holders[0] == self._me:
                    for peer in peers:
                        if peer not in run.holders:
                            self._links.send(working[run.span], self._worker[peer], WEIGHTS)
                elif self._me not in run.holders:
                    place = working[run.span]
                    room = torch.empty_like(place) if ahead else place
                    coming.append((self._links.receive(room, self._worker[run.holders[0]], WEIGHTS), room, place))
            for pending, room, place in before:  # who is not here yet gets no more than a round, in memory of its own
                self._wait(pending)
                if ahead:
                    place.copy_(room)
            before = coming
        if not known:
            self._stage.changed()

    def masters(self, shares: Shares, peers: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
        """(name, float32 tensor) of the whole stage, in canonical order; memory for one of them at a time."""
        layout, starts = self._stage.layout, [span.start for span in self._spans]
        first = 0
        for index, name in enumerate(layout.names):
            blocks = [block for block in range(first, len(starts)) if layout.blocks[block].tensor == index]
            flat = torch.empty(layout.sizes[index], device=self._stage.device)
            coming = []
            for block in blocks:
                place = flat[starts[block] - starts[first] :][: self._spans[block].stop - starts[block]]
                source = shares.holders[block][0]
                if self._me != source:
                    coming.append(self._links.receive(place, self._worker[source], MASTERS))
                    continue
                place.copy_(self._optimizer.shards[block].master)
                for peer in peers:
                    if peer != self._me:
                        self._links.send(self._optimizer.shards[block].master, self._worker[peer], MASTERS)
            for pending in coming:
                self._wait(pending)
            first += len(blocks)
            yield name, flat[: prod(layout.shapes[index])].view(layout.shapes[index])

    def _summed(
        self, sums: Tensor, runs: Mapping[int, Run | None], rooms: Mapping[int, Tensor], sent: Callable[[], None]
    ) -> Tensor:
        """The sum over all peers of this worker's run of a round, piece by piece; each peer gets the pieces of its own.
        rooms: memory for a piece of each other peer."""
        run = runs[self._me]
        total = sums[:0] if run is None else torch.empty_like(sums[run.span])
        for pieces in zip_longest(*(of.pieces if of else [] for of in runs.values())):
            mine, coming = None, []
            for peer, piece in zip(runs, pieces, strict=True):
                if piece is not None and peer != self._me:
                    self._links.send(sums[piece], self._worker[peer], SUMS)
                elif piece is not None:
                    mine, size = piece, piece.stop - piece.start
                    coming = [self._links.receive(room[:size], self._worker[p], SUMS) for p, room in rooms.items()]
            sent()
            sent = lambda: None  # noqa: E731
            for pending in coming:
                self._wait(pending)
            if run is not None and mine is not None:
                part = total[mine.start - run.span.start : mine.stop - run.span.start]
                _sum([rooms[peer][: len(part)] if peer in rooms else sums[mine] for peer in runs], part)
        return total

    def _take(self, block: int, room: list[Tensor], coming: list[Pending], took: Callable[[int], None]) -> None:
        for pending in coming:
            self._wait(pending)
        self._optimizer.put(block, room)
        took(block)

    def _rounds(self, shares: Shares, peers: Sequence[int]) -> Iterator[tuple[Run | None, ...]]:
        """Of each peer the first run whose first holder it is, then of each the second, and so on."""
        by_peer: dict[int, list[Run]] = {peer: [] for peer in peers}
        for run in self._runs(shares):
            by_peer[run.holders[0]].append(run)
        return zip_longest(*by_peer.values())

    def _runs(self, shares: Shares) -> list[Run]:
        if self._cut[0] is not shares:
            self._cut = shares, list(self._runs_of(shares.holders))
        return self._cut[1]

    def _runs_of(self, table: list[list[int]]) -> Iterator[Run]:
        first = 0
        for block, holders in enumerate(table):
            following = block + 1
            if (
                following == len(table)
                or table[following] != holders
                or self._spans[following].stop - self._spans[first].start > BUCKET
            ):
                yield Run(range(first, following), holders, slice(self._spans[first].start, self._spans[block].stop))
                first = following


def _sum(contributions: Sequence[Tensor], out: Tensor) -> None:
    """In the order of the workers; none of them changes."""
    first, *others = contributions
    if not others:
        out.copy_(first)
        return
    torch.add(first, others[0], out=out)
    for contribution in others[1:]:
        out += contribution
