"""Exchanges the state, gradients and weights of units between the workers of a stage.

    exchange = Exchange(links, stage, optimizer, me, wait)
    exchange.exponents(source)                       # if weights are outdated at the start of a generation
    exchange.copies(shares, took)                    # copies units to workers that must hold them
    reduced = exchange.sum_gradients(shares, peers, sent)    # of this worker's units
    reduced = exchange.tied.reduce(shares, reduced, exponents)  # sums tied units over all stages that hold them
    exchange.weights(shares, peers, ...)             # after an update: sends each unit from its first holder
    exchange.masters(shares, peers)                  # yields the stage's whole tensors, one at a time

If all workers of the stage hold all units (`Shares.together`), one all-reduce sums the gradients and no other message
is sent. Otherwise the first holder of a unit sums its gradient and sends it to the other holders.

All peers (the live members of the stage) make the same calls in the same order with the same `Shares`. Every method
blocks, and raises LinkBroken when the generation ends. The module `passing` transfers the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from recycle_pp.comm.links import Links
from recycle_pp.comm.tensor_bytes import aligned_bytes
from recycle_pp.comm.waiting import Pending
from recycle_pp.model.stage import Stage
from recycle_pp.numerics.gradients import Reduced
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.wire.messages.generations import Shares
from recycle_pp.wire.messages.members import Member
from recycle_pp.wire.messages.units import UnitId

from .passing import GRADIENTS, MASTERS, STATE, WEIGHTS, passing
from .runs import Run, rounds, runs_of
from .ties import Ties, Wait

AHEAD = 8  # maximum number of copies in flight to this worker


class Exchange:
    """The exchanges of worker `me` with its peers.

    wait(pending, giver): waits for a message and reports the wait; giver: the sender, if it is in another stage
    """

    def __init__(self, links: Links, stage: Stage, optimizer: StageOptimizer, me: Member, wait: Wait) -> None:
        self._links, self._stage, self._optimizer = links, stage, optimizer
        self._me, self._wait = me, wait
        self._passing = passing(links, me, wait)
        self.tied = Ties(links, stage, me, wait, self._forward)
        self._spares: dict[torch.dtype, Tensor] = {}
        self._cut: tuple[Shares | None, list[Run]] = None, []  # cache: (shares, runs of these shares)

    def exponents(self, source: Member) -> None:
        """Copies the fixed-point exponents of the peer `source` to all peers."""
        gradients = self._stage.gradients
        if gradients.reproducible:
            tensor = gradients.exponents.clone()  # a copy, because an aborted broadcast may still write to it
            self._wait(self._links.broadcast([tensor], source))
            gradients.take_exponents(tensor)

    def copies(self, shares: Shares, took: Callable[[UnitId], None]) -> None:
        """Transfers the copies listed in `shares`. took(unit): called after this worker has received a unit."""
        coming: list[tuple[int, Member, list[Tensor], list[Pending]]] = []
        for name, source, to in shares.copies:
            if not self._passing.collective and self._me not in (source, to):
                continue
            unit = self._stage.layout.number(name)
            tensors = self._optimizer.given(unit) if source == self._me else self._optimizer.room(unit)
            pending = [self._passing.give(tensor, source, [to], STATE) for tensor in tensors]
            if source != self._me:
                coming.append((unit, to, tensors, pending))
            if len(coming) >= AHEAD:
                self._take(*coming.pop(0), took)
        for each in coming:
            self._take(*each, took)

    def sum_gradients(self, shares: Shares, peers: Sequence[Member], sent: Callable[[], None]) -> Reduced:
        """Sums the gradients of the units that this worker holds. The result includes the book (`numerics.gradients`)
        and the norms of all units. Does not change the accumulators, even if the sum is aborted.

        The norms and gradients of tied units are missing until `tied.reduce`.

        sent(): called after this worker's first message
        """
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
        for run, total in self._passing.totals(gradients.sums(), peers, rounds(runs, peers), sent):
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

    def weights(self, shares: Shares, peers: Sequence[Member], known: bool) -> None:
        """Sends the weights of each unit from its first holder to the peers that do not hold the unit.

        Receives the weights into separate memory and then copies them. If a sender is suspended in the middle of a
        message, the rest of the message may arrive steps later. It must not overwrite newer weights.

        known: whether this worker already has these weights. If so, their autograd version does not change, because
            micro-batches in flight still use them.
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
                    room = torch.empty_like(place)
                    coming.append((self._passing.give(room, source, takers, WEIGHTS), room, place))
                elif takers and (self._passing.collective or self._me == source):
                    given = place if self._me == source else self._spare(len(place), place.dtype)
                    self._passing.give(given, source, takers, WEIGHTS)
            # Waits for the previous round, so that a slow worker buffers at most one round.
            for pending, room, place in before:
                self._wait(pending)
                place.copy_(room)
            before = coming
        if not known:
            self._stage.changed()

    def masters(self, shares: Shares, peers: Sequence[Member]) -> Iterator[tuple[str, Tensor]]:
        """(name, float32 tensor) for each tensor of the stage, in canonical order. Needs memory for one tensor at a
        time. Units that this worker holds are copied from its own state."""
        layout, first = self._stage.layout, 0
        holders = [*shares.holders.values()]
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
                if takers and (self._passing.collective or self._me in (source, *takers)):
                    given = place if self._me not in holders[unit] else place.clone()
                    coming.append(self._passing.give(given, source, takers, MASTERS))
            for pending in coming:
                self._wait(pending)
            # Waits for all peers. Otherwise a slow peer could have to buffer the messages for the whole stage.
            self._wait(self._links.all_reduce([torch.zeros(1, device=self._stage.device)]))
            first += len(units)
            yield name, flat[: prod(layout.shapes[index])].view(layout.shapes[index])

    @property
    def _spans(self) -> list[slice]:
        return self._stage.layout.spans

    def _room(self, units: Sequence[int]) -> tuple[dict[int, Tensor], Tensor]:
        """Allocates memory for the gradients of these units: (unit -> its view, float32 tensor of all units). The
        memory is not reused, because a message of an aborted reduction may still arrive in it."""
        sizes = [self._spans[unit].stop - self._spans[unit].start for unit in units]
        flat = aligned_bytes(4 * sum(sizes), self._stage.device).view(torch.float32)
        return dict(zip(units, flat.split(sizes), strict=True)), flat

    def _take(
        self, unit: int, to: Member, room: list[Tensor], coming: list[Pending], took: Callable[[UnitId], None]
    ) -> None:
        for pending in coming:
            self._wait(pending)
        if to == self._me:
            self._optimizer.put(unit, room)
            took(self._stage.layout.ids[unit])

    def _forward(self, unit: int, holders: Sequence[Member], grad: Tensor | None, tag: int) -> list[Pending]:
        """Sends a unit's gradient from its first holder to the others. Returns the messages to wait for.

        grad: the gradient, or memory to receive it; None if this worker does not hold the unit"""
        first, *others = holders
        if not others or not (self._passing.collective or self._me in holders):
            return []
        if grad is not None:
            return [self._passing.give(grad, first, others, tag)]
        span = self._spans[unit]
        self._passing.give(self._spare(span.stop - span.start, torch.float32), first, others, tag)
        return []

    def _spare(self, size: int, dtype: torch.dtype) -> Tensor:
        """A reused buffer with arbitrary content, for collectives whose result this worker does not need."""
        spare = self._spares.get(dtype)
        if spare is None or len(spare) < size:
            spare = self._spares[dtype] = torch.empty(size, dtype=dtype, device=self._stage.device)
        return spare[:size]

    def _runs(self, shares: Shares) -> list[Run]:
        if self._cut[0] is not shares:
            self._cut = shares, runs_of([*shares.holders.values()], self._stage.layout)
        return self._cut[1]
