"""The end of a step on one worker: reduce the stage's gradients, vote, apply the commit.

    commits.begin(orders)                 # at a generation's start: copies and weights that workers of the stage lack
    commits.reduce(orders, step)          # sums the gradients of this worker's units over the stage's live workers
    commits.reduce_tied(orders, step)     # for tied units, adds the sums of other stages
    commits.vote(orders, step, bytes)     # sends this worker's results of the step
    commits.speculate(orders, step)       # staggered: steps the optimizer before the commit
    commit = commits.settle()             # applies, confirms or undoes according to the commits received
    commits.send_weights(orders, step)    # sends weights, after the update and before their use

`Orders.shares` has the holders of each unit. If all workers of a stage hold all units, `reduce` is one all-reduce, a
survivor of a death can `copy` its reduced gradient to the others, and `begin` and `send_weights` send nothing.
Otherwise a vote means that this worker has the gradients of its units, so after a commit every copy of a unit can be
updated.

Before the commit, a death invalidates the reduction of its stage, which is repeated from the accumulators. After the
commit, `send_weights` sends the new weights. If a new generation lacks weights, `begin` first makes the missing copies
of units, then sends the weights again. A staggered optimizer updates and sends before the commit. If its step is
undone, the old weights are sent again.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from functools import partial

import torch
from recycle_schedules import OpKind, Worker

from recycle_pp.comm.waiting import Pending
from recycle_pp.data.batches import Batches
from recycle_pp.model.stage import Stage, digests
from recycle_pp.numerics.gradients import Reduced
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.protocol.commit import make_vote
from recycle_pp.protocol.participant import Orders
from recycle_pp.state.exchange import Exchange
from recycle_pp.timing.packing import pack
from recycle_pp.wire.messages.activity import REDUCTION
from recycle_pp.wire.messages.steps import Commit, Measured

from .injection import Injector
from .session import Session
from .spans import Spans, named


class Commits:
    """Attributes: reduced, the reduced gradients of uncommitted steps, which a peer may have to copy.

    batches: to log the samples in the gradient (first stage only); None: no log
    """

    def __init__(
        self,
        session: Session,
        stage: Stage,
        optimizer: StageOptimizer,
        faults: Injector,
        spans: Spans,
        batches: Batches | None = None,
    ) -> None:
        self.reduced: dict[int, Reduced] = {}
        self._session, self._stage, self._optimizer = session, stage, optimizer
        self._faults, self._spans, self._batches = faults, spans, batches
        self._waits_for = "sum"  # what all peers take part in: "sum" or "copy"
        self._sent_weights = -1, -1  # newest generation and step whose weights were sent
        self._exchange = Exchange(session.links, stage, optimizer, session.participant.worker, self._wait)

    def begin(self, orders: Orders) -> None:
        """Receives the copies that this worker lacks. Then sends the weights to all, if a worker lacks any."""
        session, holdings, shares = self._session, self._session.participant.holdings, orders.shares
        committed = session.participant.committed
        self._waits_for = "copy"
        session.doing.works(REDUCTION, committed + 1)
        if shares.knows is not None:
            self._exchange.exponents(shares.knows)
            self._note(orders, lambda: holdings.informed(committed))
        coming = {unit for unit, _, to in shares.copies if to == holdings.me}
        # Also units that it only gives: all workers can make the initial state of every unit.
        given = {unit for unit, source, _ in shares.copies if source == holdings.me}
        for unit in ({*holdings.mine} | given) - coming - self._optimizer.held.keys():
            self._optimizer.begin(unit)
        if shares.copies:
            self._faults.inject("heal", committed + 1)
        self._exchange.copies(shares, lambda unit: self._note(orders, lambda: holdings.took(unit)))
        self._note(orders, holdings.settled)
        self._optimizer.settled()
        if shares.knows is not None:
            self.send_weights(orders, committed)

    def send_weights(self, orders: Orders, step: int) -> None:
        """Sends the weights after that step to the workers that do not hold the units, once per generation."""
        if self._sent_weights == (orders.generation, step):
            return
        self._sent_weights = orders.generation, step
        holdings = self._session.participant.holdings
        if not orders.shares.together:
            self._waits_for = "copy"
            self._session.doing.works(REDUCTION, step + 1)
            self._faults.inject("spread", step)
            ahead, known = self._optimizer.is_ahead, holdings.weights == step
            with named("recycle/weights"):
                self._exchange.weights(orders.shares, self._peers(orders), ahead, known)
        self._note(orders, lambda: holdings.gathered(step))

    def digests(self, orders: Orders) -> dict[str, str]:
        """The SHA-256 of every parameter of the stage, rounded from its master to bf16, by name."""
        if self._stage.flat.dtype == torch.float32:
            return self._stage.digests()
        self._waits_for = "copy"
        found: dict[str, str] = {}
        for name, master in self._exchange.masters(orders.shares, self._peers(orders)):
            found |= digests({name: master.cpu()})
        return found

    def reduce(self, orders: Orders, step: int) -> None:
        """Reduces the accumulators without changing them: a death before the commit may require it again."""
        doing = self._session.doing
        doing.works(REDUCTION, step)
        self._waits_for = "sum"
        self.reduced.pop(step, None)
        with self._spans.span(step, REDUCTION), named("recycle/reduce"):
            sent = partial(self._faults.fire, "allreduce", step)
            reduced = self._exchange.reduce(orders.shares, self._peers(orders), sent)
        doing.works(REDUCTION, step)
        self._hold(orders, step, reduced)

    def copy(self, orders: Orders, step: int, source: Worker) -> None:
        """Takes the reduced gradient from a peer. It is a broadcast, so workers that have the gradient call it too."""
        mine = self.reduced.get(step) if self._session.participant.record(step).reduced else None
        tensors = (
            mine.to_tensors() if mine else self._stage.gradients.reduced(self._stage.gradients.payload()).to_tensors()
        )
        self._waits_for = "copy"
        self._wait(self._session.links.broadcast(tensors, source))
        if mine is None:
            self._hold(orders, step, Reduced.from_tensors(tensors))

    def reduce_tied(self, orders: Orders, step: int) -> None:
        """Adds the sums of other stages for tied units. Raises LinkBroken."""
        if self._exchange.tied.units:
            self._session.check(orders)
            self._waits_for = "sum"
            with named("recycle/ties"):
                self.reduced[step] = self._exchange.tied.reduce(orders.shares, self.reduced[step])

    def _wait(self, pending: Pending, giver: Worker | None = None) -> None:
        """Blocks until the message has arrived, and reports the wait. giver: its sender; None: all peers."""
        doing, step = self._session.doing, self._session.participant.committed + 1
        what = self._waits_for if giver is None else "tensor"
        doing.waits(what, step, peer=giver, arrived=pending.arrived)
        pending.wait()
        doing.works(REDUCTION, step)

    def vote(self, orders: Orders, step: int, logged_bytes: int) -> None:
        reduced, counts = self.reduced[step], self.reduced[step].counts.tolist()
        with self._session.lock:
            speaks = self._session.participant.speaks
        losses = reduced.losses.tolist() if self._stage.last else []
        self._faults.fire("vote", step)
        self._session.send(  # before the vote, because it must have arrived when the step is committed
            Measured(
                step=step,
                spans=pack(self._spans.take(step)),
                samples=self._samples(step, counts),
                logged_bytes=logged_bytes,
                lr=self._optimizer.lr(step),
                cpu=time.process_time(),
            )
        )
        squares, finite, fits = reduced.squares, reduced.finite, reduced.fits
        checksums, changed = self._optimizer.inspected(reduced)  # after the last step, which every holder has applied
        held = array("q", checksums.values()).tobytes(), changed
        self._session.send(make_vote(orders.generation, step, squares, finite, fits, counts, losses, speaks, *held))

    def _samples(self, step: int, counts: list[float]) -> list[int]:
        """Sample ids in the gradient, with multiplicity. Every peer of the stage sends them, because the worker with
        the vote may die together with the coordinator, and the next coordinator logs the step."""
        if self._batches is None or not self._stage.first:
            return []
        return [i for g, n in enumerate(counts) for _ in range(int(n)) for i in self._batches.sample_ids(step, g)]

    def speculate(self, orders: Orders, step: int) -> bool:
        """Updates before the commit, unless the gradient is not finite or did not fit the sums. Returns False if the
        worker must wait for the commit. Raises Superseded.

        In every generation all peers call `send_weights` for the same step, whether they have updated early, in this
        generation or before, or wait for the commit. If the step is undone, the coordinator has the old weights sent
        again (`Shares.knows`)."""
        speculates = self._steps_ahead(orders, step)
        if self._session.participant.applied == step:
            self.send_weights(orders, step)
        return speculates

    def _steps_ahead(self, orders: Orders, step: int) -> bool:
        with self._session.lock:
            self._session.check(orders)  # new orders may repeat the reduction
            participant, reduced = self._session.participant, self.reduced[step]
            if participant.committed != step - 1 or participant.applied != step - 1:
                return False
            if not (reduced.finite and reduced.fits):
                return False
            participant.speculate(step)  # before the update, so that a later revocation finds a step to undo
        self._faults.fire("optimizer", step)
        self._session.doing.works(OpKind.OPTIMIZER, step)
        with self._spans.span(step + 1, OpKind.OPTIMIZER), named("recycle/O"):
            self._optimizer.speculate(self.reduced[step], step)
        return True

    def settle(
        self,
        undone: Callable[[int], None],
        forgotten: Callable[[int], None],
        applied: Callable[[Commit, Reduced], None],
    ) -> None:
        """Applies everything that is pending. Callbacks:

        undone(step): an early update was undone
        forgotten(step): the step starts again
        applied(commit, reduced): after every commit"""
        while self._session.pending():
            with self._session.lock:
                participant = self._session.participant
                undo, step = participant.undo, participant.applied
                if undo:
                    participant.taken_back()
                again, attempt, broken = participant.again, participant.attempt, participant.committed + 1
                if again:
                    participant.begins_again()
                commit = participant.next_commit()
                speculated = commit is not None and participant.applied == commit.step
                if commit is not None:
                    participant.applied = commit.step
            if undo:
                self._optimizer.undo()
                undone(step)
            if again:
                self._stage.gradients.begin_again(attempt.coarser, self.reduced.pop(broken, None))
                forgotten(broken)
            if commit is not None:
                self._session.doing.works(OpKind.OPTIMIZER, commit.step)
                self._apply(commit, speculated)
                self._stage.gradients.clear()
                applied(commit, self.reduced.pop(commit.step))

    def _apply(self, commit: Commit, speculated: bool) -> None:
        if speculated:
            self._optimizer.confirm()
            return
        if commit.scale is None:
            self._optimizer.step(self.reduced[commit.step], commit.step, None)
            return
        self._faults.fire("optimizer", commit.step)
        with self._spans.span(commit.step + 1, "O"), named("recycle/O"):
            self._optimizer.step(self.reduced[commit.step], commit.step, commit.scale)

    def _hold(self, orders: Orders, step: int, reduced: Reduced) -> None:
        """Stores the gradient if the orders are still valid. Otherwise the report has stated that there is none."""
        with self._session.lock:
            self._session.check(orders)
            self.reduced[step] = reduced
            self._session.participant.record(step).reduced = True

    def _peers(self, orders: Orders) -> list[int]:
        """The pipelines of the stage's live workers."""
        with self._session.lock:
            self._session.check(orders)
            announced = self._session.participant.announced
            assert announced is not None
            return sorted(w.pipeline for w in announced.members if w.stage == self._stage.stage)

    def _note(self, orders: Orders, change: Callable[[], None]) -> None:
        """Calls `change` if the orders are still valid. Otherwise the report has already been sent without it."""
        with self._session.lock:
            self._session.check(orders)
            change()
