"""What the workers of a stage send each other where each holds only some blocks of its optimizer state.

    exchange = Exchange(links, stage, optimizer, me, wait)
    exchange.exponents(source)                       # a generation begins, and somebody is new
    exchange.copies(shares, took)                    # what this worker has to hold, from those who do
    reduced = exchange.reduce(shares, peers, sent)   # its blocks' gradients: summed by the first holder, given to all
    exchange.weights(shares, peers, ...)             # after the update: each block from its first holder
    exchange.masters(shares, peers)                  # every tensor whole, one after the other

All peers call the same, in the same order, with the same `Shares`; everything blocks, and ends with LinkBroken when the
generation does. `passing.py` is how they do it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

import torch
from recycle_schedules import Worker
from torch import Tensor

from recycle_pp.comm.links import Links
from recycle_pp.comm.waiting import Pending
from recycle_pp.model.stage import Stage
from recycle_pp.numerics.gradients import Reduced
from recycle_pp.numerics.shards import ShardedOptimizer
from recycle_pp.wire.messages.workers import Shares

from .passing import GRADIENTS, MASTERS, STATE, WEIGHTS, passing
from .shard_runs import Run, rounds, runs_of
from .tied_blocks import TiedBlocks, Wait

AHEAD = 8  # copies that a worker takes at a time


class Exchange:
    """wait(pending, giver): waits for a message, saying so to whoever watches. giver: if it is of another stage."""

    def __init__(self, links: Links, stage: Stage, optimizer: ShardedOptimizer, me: Worker, wait: Wait) -> None:
        self._links, self._stage, self._optimizer = links, stage, optimizer
        self._worker, self._me, self._wait = me, me.pipeline, wait
        self._way = passing(links, me, wait)
        self._spans = stage.layout.spans
        self.tied = TiedBlocks(links, stage, optimizer, me, wait, self._forward)
        self._spares: dict[torch.dtype, Tensor] = {}
        self._cut: tuple[Shares | None, list[Run]] = None, []  # the runs of these shares

    def exponents(self, source: int) -> None:
        """Everybody has those of that peer."""
        gradients = self._stage.gradients
        if gradients.reproducible:
            tensor = gradients.exponents.clone()  # an aborted broadcast may write to it
            self._wait(self._links.broadcast([tensor], self._worker._replace(pipeline=source)))
            gradients.take_exponents(tensor)

    def copies(self, shares: Shares, took: Callable[[int], None]) -> None:
        """`took(block)` after each block that came."""
        coming: list[tuple[int, int, list[Tensor], list[Pending]]] = []
        for block, source, to in shares.copies:
            if not self._way.everybody and self._me not in (source, to):
                continue
            tensors = self._optimizer.given(block) if source == self._me else self._optimizer.room(block)
            pending = [self._way.give(tensor, source, [to], STATE) for tensor in tensors]
            if source != self._me:
                coming.append((block, to, tensors, pending))
            if len(coming) >= AHEAD:
                self._take(*coming.pop(0), took)
        for each in coming:
            self._take(*each, took)

    def reduce(self, shares: Shares, peers: Sequence[int], sent: Callable[[], None]) -> Reduced:
        """Every block's gradient on all its holders (`optimizer.shards[block].grad`), and what all peers know of it;
        but for what other stages hold as well: there each first holder has its stage's sums (`tied.unite`).

        sent(): called when this worker has sent its first sums.
        """
        optimizer, gradients, tied = self._optimizer, self._stage.gradients, set(self.tied.blocks)
        mine = [block for block, holders in enumerate(shares.holders) if self._me in holders]
        optimizer.start_step(mine, [block for block in mine if shares.holders[block][0] == self._me])
        own: dict[int, Tensor] = {}
        counts = gradients.largest_counts
        squares = torch.zeros(len(self._spans), dtype=torch.float64, device=self._stage.device)
        largest = torch.zeros(sum(counts), device=self._stage.device)
        places = largest.split(counts)
        forwarded: list[Pending] = []
        for run, total in self._way.totals(gradients.sums(), peers, rounds(self._runs(shares), peers), sent):
            for block in run.blocks:
                span = self._spans[block]
                part = None if total is None else total[span.start - run.span.start : span.stop - run.span.start]
                if block in tied:
                    if part is not None:
                        own[block] = part.clone()
                    continue
                if part is not None:
                    grad = optimizer.restore(block, part)
                    squares[block] = optimizer.squares(block, grad).item()
                    if counts[block]:
                        places[block].copy_(optimizer.largest(block, grad))
                forwarded += self._forward(block, run.holders, GRADIENTS)
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
        for runs in [*rounds(self._runs(shares), peers), ()]:
            coming = []
            for run in filter(None, runs):
                place, source = working[run.span], run.holders[0]
                takers = [peer for peer in peers if peer not in run.holders]
                if self._me in takers:
                    room = torch.empty_like(place) if ahead else place
                    coming.append((self._way.give(room, source, takers, WEIGHTS), room, place))
                elif takers and (self._way.everybody or self._me == source):
                    given = place if self._me == source else self._spare(len(place), place.dtype)
                    self._way.give(given, source, takers, WEIGHTS)
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
                source, *_ = shares.holders[block]
                if self._me == source:
                    place.copy_(self._optimizer.shards[block].master)
                given = self._optimizer.shards[block].master if self._me == source else place
                coming.append(self._way.give(given, source, [peer for peer in peers if peer != source], MASTERS))
            for pending in coming:
                self._wait(pending)
            first += len(blocks)
            yield name, flat[: prod(layout.shapes[index])].view(layout.shapes[index])

    def _take(
        self, block: int, to: int, room: list[Tensor], coming: list[Pending], took: Callable[[int], None]
    ) -> None:
        for pending in coming:
            self._wait(pending)
        if to == self._me:
            self._optimizer.put(block, room)
            took(block)

    def _forward(self, block: int, holders: list[int], tag: int) -> list[Pending]:
        """The block's gradient from its first holder to the others; what this worker has to wait for."""
        first, *others = holders
        if not others or not (self._way.everybody or self._me in holders):
            return []
        if self._me in holders:
            return [self._way.give(self._optimizer.gradient(block), first, others, tag)]
        span = self._spans[block]
        self._way.give(self._spare(span.stop - span.start, torch.float32), first, others, tag)
        return []

    def _spare(self, size: int, dtype: torch.dtype) -> Tensor:
        """Memory for what others pass: the same each time, for garbage."""
        spare = self._spares.get(dtype)
        if spare is None or len(spare) < size:
            spare = self._spares[dtype] = torch.empty(size, dtype=dtype, device=self._stage.device)
        return spare[:size]

    def _runs(self, shares: Shares) -> list[Run]:
        if self._cut[0] is not shares:
            self._cut = shares, runs_of(shares.holders, self._spans)
        return self._cut[1]
