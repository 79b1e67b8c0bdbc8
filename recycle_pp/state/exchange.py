"""The messages between the workers of a stage about its units: copies of state, gradients, weights.

    exchange = Exchange(links, stage, optimizer, me, wait)
    exchange.exponents(source)                       # a generation begins, and a worker is new
    exchange.copies(shares, took)                    # the units that this worker has to hold, from their holders
    reduced = exchange.reduce(shares, peers, sent)   # gradients of its units
    reduced = exchange.tied.unite(shares, reduced)   # the same with the sums over all stages, for tied units
    exchange.weights(shares, peers, ...)             # after the update: each unit from its first holder
    exchange.masters(shares, peers)                  # every tensor whole, one after another

If all workers of the stage hold all units (`Shares.together`), gradients are summed by one all-reduce, and nothing else
is sent. Otherwise the first holder of a unit sums its gradient and sends it to the other holders.

All peers call the same, in the same order, with the same `Shares`. Every method blocks, and raises LinkBroken when the
generation ends. `passing` moves the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

import torch
from recycle_schedules import Worker
from torch import Tensor

from recycle_pp.comm.links import Links
from recycle_pp.comm.tensor_bytes import aligned_bytes
from recycle_pp.comm.waiting import Pending
from recycle_pp.model.stage import Stage
from recycle_pp.numerics.gradients import Reduced
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.wire.messages.workers import Shares

from .passing import GRADIENTS, MASTERS, STATE, WEIGHTS, passing
from .runs import Run, rounds, runs_of
from .ties import Ties, Wait

AHEAD = 8  # copies that a worker takes at a time


class Exchange:
    """wait(pending, giver): waits for a message and reports the wait. giver: the sender, if it is of another stage."""

    def __init__(self, links: Links, stage: Stage, optimizer: StageOptimizer, me: Worker, wait: Wait) -> None:
        self._links, self._stage, self._optimizer = links, stage, optimizer
        self._worker, self._me, self._wait = me, me.pipeline, wait
        self._way = passing(links, me, wait)
        self._spans = stage.layout.spans
        self.tied = Ties(links, stage, me, wait, self._forward)
        self._spares: dict[torch.dtype, Tensor] = {}
        self._cut: tuple[Shares | None, list[Run]] = None, []  # the runs of these shares

    def exponents(self, source: int) -> None:
        """All peers take those of that peer."""
        gradients = self._stage.gradients
        if gradients.reproducible:
            tensor = gradients.exponents.clone()  # an aborted broadcast may write to it
            self._wait(self._links.broadcast([tensor], self._worker._replace(pipeline=source)))
            gradients.take_exponents(tensor)

    def copies(self, shares: Shares, took: Callable[[int], None]) -> None:
        """`took(unit)` after each unit that has arrived."""
        coming: list[tuple[int, int, list[Tensor], list[Pending]]] = []
        for unit, source, to in shares.copies:
            if not self._way.everybody and self._me not in (source, to):
                continue
            tensors = self._optimizer.given(unit) if source == self._me else self._optimizer.room(unit)
            pending = [self._way.give(tensor, source, [to], STATE) for tensor in tensors]
            if source != self._me:
                coming.append((unit, to, tensors, pending))
            if len(coming) >= AHEAD:
                self._take(*coming.pop(0), took)
        for each in coming:
            self._take(*each, took)

    def reduce(self, shares: Shares, peers: Sequence[int], sent: Callable[[], None]) -> Reduced:
        """The gradients of the units that this worker holds, and what all peers know of the others. Out of place: an
        aborted sum leaves the accumulators as they are.

        Tied units have their norm and gradient only after `tied.unite`. sent(): called when this worker has sent its
        first sums."""
        gradients = self._stage.gradients
        if shares.together:
            payload = gradients.payload()
            pending = self._links.all_reduce(payload)
            sent()
            self._wait(pending)
            return gradients.reduced(payload)
        tied, runs = set(self.tied.units), self._runs(shares)
        mine = [unit for run in runs if self._me in run.holders for unit in run.units]
        grads, flat = self._room(mine)
        own: dict[int, Tensor] = {}
        counts = gradients.largest_counts
        squares = torch.zeros(len(self._spans), dtype=torch.float64, device=self._stage.device)
        largest = torch.zeros(sum(counts), device=self._stage.device)
        places = largest.split(counts)
        forwarded: list[Pending] = []
        for run, total in self._way.totals(gradients.sums(), peers, rounds(runs, peers), sent):
            for unit in run.units:
                span = self._spans[unit]
                part = None if total is None else total[span.start - run.span.start : span.stop - run.span.start]
                if unit in tied:
                    if part is not None:
                        own[unit] = part.clone()
                    continue
                if part is not None:
                    gradients.restore(unit, part, grads[unit])
                    squares[unit] = gradients.square(unit, grads[unit]).item()
                    if counts[unit]:
                        places[unit].copy_(gradients.largest_of(unit, grads[unit]))
                forwarded += self._forward(unit, run.holders, grads.get(unit), GRADIENTS)
        book = gradients.book()
        self._wait(self._links.all_reduce([book, squares, largest]))
        for pending in forwarded:
            self._wait(pending)
        return gradients.concluded(flat, book, squares.tolist(), gradients.shared_of(own), largest, tuple(mine))

    def weights(self, shares: Shares, peers: Sequence[int], ahead: bool, known: bool) -> None:
        """The weights of all units, on every peer.

        In place: a late message of an aborted generation has the same bits. ahead: of an update that may be undone;
        weights are received elsewhere and copied, or a late message could change weights that have been sent again
        since. known: this worker has these weights already, and autograd has noted their version for micro-batches in
        flight.
        """
        if all(len(run.holders) == len(peers) for run in self._runs(shares)):
            return
        working = self._stage.working
        before: list[tuple[Pending, Tensor, Tensor]] = []
        for runs in [*rounds(self._runs(shares), peers), ()]:
            coming = []
            for run in filter(None, runs):
                place, source = working[run.span].data, run.holders[0]
                takers = [peer for peer in peers if peer not in run.holders]
                if self._me in takers:
                    room = torch.empty_like(place) if ahead else place
                    coming.append((self._way.give(room, source, takers, WEIGHTS), room, place))
                elif takers and (self._way.everybody or self._me == source):
                    given = place if self._me == source else self._spare(len(place), place.dtype)
                    self._way.give(given, source, takers, WEIGHTS)
            for (
                pending,
                room,
                place,
            ) in before:  # a worker that is not here yet is sent one round at most, which it keeps
                self._wait(pending)
                if ahead:
                    place.copy_(room)
            before = coming
        if not known:
            self._stage.changed()

    def masters(self, shares: Shares, peers: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
        """(name, float32 tensor) of the whole stage, in canonical order; memory for one of them at a time. A worker
        that holds a unit takes its own copy."""
        layout, first = self._stage.layout, 0
        holders = shares.holders
        for index, name in enumerate(layout.names):
            units = [unit for unit in range(first, len(layout.units)) if layout.units[unit].tensor == index]
            flat = torch.empty(layout.sizes[index], device=self._stage.device)
            coming = []
            for unit in units:
                span, start = self._spans[unit], self._spans[first].start
                place = flat[span.start - start : span.stop - start]
                source, takers = holders[unit][0], [peer for peer in peers if peer not in holders[unit]]
                if self._me in holders[unit]:
                    place.copy_(self._optimizer.vectors(unit)[0])
                if takers and (self._way.everybody or self._me in (source, *takers)):
                    given = place if self._me not in holders[unit] else place.clone()
                    coming.append(self._way.give(given, source, takers, MASTERS))
            for pending in coming:
                self._wait(pending)
            # A slow peer keeps what comes early: without this all that the others send, up to the whole stage.
            self._wait(self._links.all_reduce([torch.zeros(1, device=self._stage.device)]))
            first += len(units)
            yield name, flat[: prod(layout.shapes[index])].view(layout.shapes[index])

    def _room(self, units: Sequence[int]) -> tuple[dict[int, Tensor], Tensor]:
        """New memory for the gradients of these units, by unit, and all of it. In older memory a message of an aborted
        reduction may still arrive."""
        sizes = [self._spans[unit].stop - self._spans[unit].start for unit in units]
        flat = aligned_bytes(4 * sum(sizes), self._stage.device).view(torch.float32)
        return dict(zip(units, flat.split(sizes), strict=True)), flat

    def _take(self, unit: int, to: int, room: list[Tensor], coming: list[Pending], took: Callable[[int], None]) -> None:
        for pending in coming:
            self._wait(pending)
        if to == self._me:
            self._optimizer.put(unit, room)
            took(unit)

    def _forward(self, unit: int, holders: Sequence[int], grad: Tensor | None, tag: int) -> list[Pending]:
        """Sends the unit's gradient from its first holder to the others; returns what this worker has to wait for.
        grad: this worker's, or room for it; None if it does not hold the unit."""
        first, *others = holders
        if not others or not (self._way.everybody or self._me in holders):
            return []
        if grad is not None:
            return [self._way.give(grad, first, others, tag)]
        span = self._spans[unit]
        self._way.give(self._spare(span.stop - span.start, torch.float32), first, others, tag)
        return []

    def _spare(self, size: int, dtype: torch.dtype) -> Tensor:
        """Memory for the messages of other workers: the same each time, with garbage in it."""
        spare = self._spares.get(dtype)
        if spare is None or len(spare) < size:
            spare = self._spares[dtype] = torch.empty(size, dtype=dtype, device=self._stage.device)
        return spare[:size]

    def _runs(self, shares: Shares) -> list[Run]:
        if self._cut[0] is not shares:
            self._cut = shares, runs_of(shares.holders, self._stage.layout)
        return self._cut[1]
