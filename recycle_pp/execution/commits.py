"""The end of a step on one worker: reduce the stage's gradients, vote, apply the commit.

    commits.begin(orders)                 # a generation: copies and weights that workers of the stage lack
    commits.reduce(orders, step)          # the gradients of this worker's units, summed over the stage's live workers
    commits.unite(orders, step)           # and over other stages, for tied units
    commits.vote(orders, step, bytes)     # what this worker knows of the step
    commits.speculate(orders, step)       # staggered: step the optimizer before the job has agreed
    commit = commits.settle()             # apply (confirm, undo) what has been agreed since
    commits.spread(orders, step)          # after a commit, before the weights are used

`Orders.shares` says who holds which unit. If all workers of a stage hold all units, `reduce` is one all-reduce, a
survivor of a death can `copy` its reduced gradient to the others, and `begin` and `spread` send nothing. Otherwise a
vote says that this worker has the gradients of its units, so a commit means that every copy of a unit can be updated.
Before the commit, a death voids the reduction of its stage, which is repeated from the accumulators. After it, `spread`
sends the new weights, and a generation in which weights are missing sends them again (`begin`), after missing copies of
units are made. A staggered optimizer updates and sends ahead of the commit; if its step is undone, the old weights are
sent again.
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
from recycle_pp.telemetry.packing import pack
from recycle_pp.wire.messages.activity import REDUCTION
from recycle_pp.wire.messages.workers import Commit, Measured

from .injection import Injector
from .session import Session
from .spans import Spans, named


class Commits:
    """`reduced` keeps the reduced gradients of steps that are not committed: a peer may need a copy of them.

    batches: the first stage logs the samples that are in the gradient; None: it does not.
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
        self._waits_for = "sum"  # or "copy": what all peers have a part in
        self._spread = -1, -1  # the newest generation and step whose weights were sent
        self._exchange = Exchange(session.links, stage, optimizer, session.participant.worker, self._wait)

    def begin(self, orders: Orders) -> None:
        """Makes the copies that this worker lacks, then sends weights to all workers if one lacks some."""
        session, holdings, shares = self._session, self._session.participant.holdings, orders.shares
        committed = session.participant.committed
        self._waits_for = "copy"
        session.doing.works(REDUCTION, committed + 1)
        if shares.knows is not None:
            self._exchange.exponents(shares.knows)
            self._note(orders, lambda: holdings.informed(committed))
        coming = {unit for unit, _, to in shares.copies if to == holdings.me}
        for unit in set(holdings.mine) - coming - self._optimizer.held.keys():
            self._optimizer.begin(unit)
        if shares.copies:
            self._faults.strike("heal", committed + 1)
        self._exchange.copies(shares, lambda unit: self._note(orders, lambda: holdings.took(unit)))
        self._note(orders, holdings.settled)
        self._optimizer.settled()
        if shares.knows is not None:
            self.spread(orders, committed)

    def spread(self, orders: Orders, step: int) -> None:
        """All workers get the weights after that step of the units that they do not hold; once in a generation."""
        if self._spread == (orders.generation, step):
            return
        self._spread = orders.generation, step
        holdings = self._session.participant.holdings
        if not orders.shares.together:
            self._waits_for = "copy"
            self._session.doing.works(REDUCTION, step + 1)
            self._faults.strike("spread", step)
            ahead, known = self._optimizer.is_ahead, holdings.weights == step
            with named("recycle/weights"):
                self._exchange.weights(orders.shares, self._peers(orders), ahead, known)
        self._note(orders, lambda: holdings.gathered(step))

    def digests(self, orders: Orders) -> dict[str, str]:
        """The SHA-256 of every parameter of the stage, in bf16 of its master, by name."""
        if self._stage.flat.dtype == torch.float32:
            return self._stage.digests()
        self._waits_for = "copy"
        found: dict[str, str] = {}
        for name, master in self._exchange.masters(orders.shares, self._peers(orders)):
            found |= digests({name: master.cpu()})
        return found

    def reduce(self, orders: Orders, step: int) -> None:
        """From the accumulators, which stay as they are: a death before the commit may have it repeated."""
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
        """Takes over the reduced gradient of a peer that has it. Workers that have it take part too: a broadcast."""
        mine = self.reduced.get(step) if self._session.participant.record(step).reduced else None
        tensors = (
            mine.to_tensors() if mine else self._stage.gradients.reduced(self._stage.gradients.payload()).to_tensors()
        )
        self._waits_for = "copy"
        self._wait(self._session.links.broadcast(tensors, source))
        if mine is None:
            self._hold(orders, step, Reduced.from_tensors(tensors))

    def unite(self, orders: Orders, step: int) -> None:
        """Adds the sums of other stages for tied units. Raises LinkBroken."""
        if self._exchange.tied.units:
            self._session.check(orders)
            self._waits_for = "sum"
            with named("recycle/ties"):
                self.reduced[step] = self._exchange.tied.unite(orders.shares, self.reduced[step])

    def _wait(self, pending: Pending, giver: Worker | None = None) -> None:
        """Blocks until it is there, and says so meanwhile; giver: who sends it, None if all peers have a part in it."""
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
        self._session.send(  # first: it has to be there when the step is agreed
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
        checksums, changed = self._optimizer.inspected(reduced)  # as after the last step, which each holder has applied
        held = array("q", checksums.values()).tobytes(), changed
        self._session.send(make_vote(orders.generation, step, squares, finite, fits, counts, losses, speaks, *held))

    def _samples(self, step: int, counts: list[float]) -> list[int]:
        """What went into the sum, as often as it did. Each peer says it: who speaks for them may die with the
        coordinator that has agreed on the step, and the next one writes the step down."""
        if self._batches is None or not self._stage.first:
            return []
        return [i for g, n in enumerate(counts) for _ in range(int(n)) for i in self._batches.sample_ids(step, g)]

    def speculate(self, orders: Orders, step: int) -> bool:
        """Steps ahead of the agreement, unless the gradient is not finite or did not fit into the sums. False: the
        commit has to be waited for. Raises Superseded.

        All peers come to the same step's `spread` in every generation: those that have updated ahead, now or in an
        earlier generation, and those that wait for the commit. If the step is undone, the coordinator has the weights
        sent again (`Shares.knows`)."""
        speculates = self._steps_ahead(orders, step)
        if self._session.participant.applied == step:
            self.spread(orders, step)
        return speculates

    def _steps_ahead(self, orders: Orders, step: int) -> bool:
        with self._session.lock:
            self._session.check(orders)  # new ones may have the stage sum again
            participant, reduced = self._session.participant, self.reduced[step]
            if participant.committed != step - 1 or participant.applied != step - 1:
                return False
            if not (reduced.finite and reduced.fits):
                return False
            participant.speculate(step)  # first: whoever revokes it from now on finds it to be undone
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
        """Everything that is pending: `undone(step)` after the step was taken back, `forgotten(step)` where it begins
        again, `applied` after every commit."""
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
        """Counts only if the orders still stand: else the report has said that this worker has no sums."""
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
        """Counts only if the orders still stand: otherwise the report has said already what this worker has."""
        with self._session.lock:
            self._session.check(orders)
            change()
