"""The end of a step on one worker: reduce the stage's gradients, vote, apply what the job agrees on.

commits.begin(orders)                 # a generation: whatever this worker lacks (see `sharded_commits`)
commits.reduce(orders, step)          # all-reduce over the stage's live workers
commits.unite(orders, step, tag)      # what other stages hold of the same parameters, if they do
commits.vote(orders, step, bytes)     # what this worker has to say on the step
commits.speculate(orders, step)       # staggered: step the optimizer before the job has agreed
commit = commits.settle()             # apply (confirm, undo) what has been agreed since
commits.spread(orders, step)          # after a commit, before anything uses the weights
"""

from __future__ import annotations

import time
from collections.abc import Callable

from recycle_schedules import Worker

from recycle_pp.comm.waiting import Pending
from recycle_pp.data.batches import Batches
from recycle_pp.model.stage import Stage
from recycle_pp.numerics.gradients import Reduced
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.protocol.commit import make_vote
from recycle_pp.protocol.participant import Orders
from recycle_pp.telemetry.packing import pack
from recycle_pp.wire.messages.workers import Commit, Measured

from .injection import Injector
from .session import Session
from .spans import Spans, named
from .ties import exchange


class Commits:
    """`reduced` keeps the reduced gradients of steps that are not committed: a peer may need a copy of them.

    batches: given, the first stage names the samples that are in the gradient.
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

    def begin(self, orders: Orders) -> None:
        """Nothing: this worker has all that it needs."""

    def spread(self, orders: Orders, step: int) -> None:
        """Nothing: every worker has updated all of its weights itself."""

    def digests(self, orders: Orders) -> dict[str, str]:
        """Of every parameter of the stage, by name."""
        return self._stage.digests()

    def reduce(self, orders: Orders, step: int) -> None:
        """Out of place: an aborted all-reduce leaves its buffers partly summed; the accumulators must survive it."""
        self._session.doing.works("R", step)
        self._waits_for = "sum"
        payload = self._stage.gradients.payload()
        with self._spans.span(step, "R"), named("recycle/reduce"):
            pending = self._session.links.all_reduce(payload)
            self._faults.fire("allreduce", step)
            self._wait(pending)
        self._hold(orders, step, self._stage.gradients.reduced(payload))

    def copy(self, orders: Orders, step: int, source: Worker) -> None:
        """A peer has the sums already: take them over. Those who have them take part all the same (a broadcast)."""
        mine = self.reduced.get(step) if self._session.participant.record(step).reduced else None
        tensors = (
            mine.to_tensors() if mine else self._stage.gradients.reduced(self._stage.gradients.payload()).to_tensors()
        )
        self._waits_for = "copy"
        self._wait(self._session.links.broadcast(tensors, source))
        if mine is None:
            self._hold(orders, step, Reduced.from_tensors(tensors))

    def unite(self, orders: Orders, step: int, tag: int) -> None:
        """Adds what other stages have of the parameters that they hold as well. Raises LinkBroken."""
        if (ties := self._stage.ties) is None:
            return
        participant = self._session.participant
        with self._session.lock:
            self._session.check(orders)
            assert participant.announced is not None
            members = participant.announced.members
        reduced = self.reduced[step]
        with named("recycle/ties"):
            parcels = exchange(self._session.links, ties, reduced, participant.worker, members, tag, self._wait)
        self.reduced[step] = ties.united(reduced, parcels)

    def _wait(self, pending: Pending, giver: Worker | None = None) -> None:
        """Blocks until it is there, and says so meanwhile; giver: who sends it, None if all peers have a part in it."""
        doing, step = self._session.doing, self._session.participant.committed + 1
        what = self._waits_for if giver is None else "tensor"
        doing.waits(what, step, peer=giver, arrived=pending.arrived)
        pending.wait()
        doing.works("R", step)

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
        generation, held = orders.generation, self._inspected()
        self._session.send(make_vote(generation, step, squares, finite, fits, counts, losses, speaks, *held))

    def _inspected(self) -> tuple[bytes, list[int]]:
        """What its peers compare, where they do not hold all: see `Vote.blocks` and `Vote.changed`."""
        return b"", []

    def _samples(self, step: int, counts: list[float]) -> list[int]:
        """What went into the sum, as often as it did. Each peer says it: who speaks for them may die with the
        coordinator that has agreed on the step, and the next one writes the step down."""
        if self._batches is None or not self._stage.first:
            return []
        return [i for g, n in enumerate(counts) for _ in range(int(n)) for i in self._batches.sample_ids(step, g)]

    def speculate(self, orders: Orders, step: int) -> bool:
        """Steps ahead of the agreement, if there is something to hope for: not with a gradient that is not finite, or
        that did not fit into the sums. False: the commit has to be waited for. Raises Superseded."""
        with self._session.lock:
            self._session.check(orders)  # new ones may have the stage sum again
            participant, reduced = self._session.participant, self.reduced[step]
            if participant.committed != step - 1 or participant.applied != step - 1:
                return False
            if not (reduced.finite and reduced.fits):
                return False
            participant.speculate(step)  # first: whoever revokes it from now on finds it to be undone
        self._faults.fire("optimizer", step)
        self._session.doing.works("O", step)
        with self._spans.span(step + 1, "O"), named("recycle/O"):
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
                self._session.doing.works("O", commit.step)
                self._apply(commit, speculated)
                self._stage.gradients.clear()
                applied(commit, self.reduced.pop(commit.step))

    def _apply(self, commit: Commit, speculated: bool) -> None:
        if commit.scale is None:
            self._stage.gradients.follow(self.reduced[commit.step])
            return
        if speculated:
            self._optimizer.confirm()
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
