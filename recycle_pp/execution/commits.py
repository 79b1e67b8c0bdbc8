"""Ends a step on one worker: reduces the stage's gradients, votes, applies the commit.

    commits.begin(orders)                 # at the start of a generation: sends missing copies and weights
    commits.sum_gradients(orders, step)   # sums the gradients of this worker's units over the stage's live workers
    commits.sum_tied_gradients(orders, step)     # adds the sums of other stages to tied units
    commits.vote(orders, step, bytes)     # sends this worker's results of the step
    commits.speculate(orders, step)       # staggered: updates before the commit
    commits.settle(undone, forgotten, decided, applied)  # applies, confirms or rolls back updates
    commits.send_weights(orders, step)    # sends weights, after the update and before their use

`Orders.shares` lists the holders of each unit. If every worker of a stage holds all units, `sum_gradients` is one
all-reduce, and `begin` and `send_weights` send nothing. Otherwise a worker votes once it has the gradients of its own
units, so that after a commit every holder of a unit can update its copy.

If a worker dies before the commit, its stage repeats the reduction from the accumulators. If every worker holds all
units, a survivor with the reduced gradient can instead `copy` it to its peers. After the commit, `send_weights` sends
the new weights. If a worker lacks weights at the start of a generation, `begin` copies the missing units and then sends
all weights again. A staggered optimizer updates its units and sends the weights before the commit. If this update is
rolled back, the old weights are sent again.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from functools import partial

import torch
from recycle_schedules import OpKind

from recycle_pp.comm.waiting import Pending
from recycle_pp.data.batches import Batches
from recycle_pp.islands.client import Client
from recycle_pp.model.stage import Stage, digests
from recycle_pp.numerics.gradients import Reduced
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.protocol.ballot import make_vote
from recycle_pp.protocol.participant import Orders
from recycle_pp.state.exchange import Exchange
from recycle_pp.timing.packing import pack
from recycle_pp.wire.messages.activity import REDUCTION
from recycle_pp.wire.messages.members import Member
from recycle_pp.wire.messages.steps import Commit, Measured

from .device import memory_used
from .injection import Injector
from .session import Session
from .spans import Spans, named


class Commits:
    """The ends of steps on this worker.

    reduced  step -> reduced gradient, kept until the commit because a peer may need a copy
    batches  source of the sample ids for the log (first stage only); None disables the log
    island   takes part in the rounds of the islands; None if the job does not use islands
    """

    def __init__(
        self,
        session: Session,
        stage: Stage,
        optimizer: StageOptimizer,
        faults: Injector,
        spans: Spans,
        batches: Batches | None = None,
        island: Client | None = None,
    ) -> None:
        self.reduced: dict[int, Reduced] = {}
        self._session, self._stage, self._optimizer = session, stage, optimizer
        self._faults, self._spans, self._batches, self._island = faults, spans, batches, island
        self._waits_for = "sum"  # the collective in progress: "sum" or "copy"
        self._sent_weights = -1, -1  # (generation, step) of the last call of `send_weights`
        self._exchange = Exchange(session.links, stage, optimizer, session.participant.member, self._wait)

    def begin(self, orders: Orders) -> None:
        """Copies units to holders that lack them. Then sends all weights again if a worker lacks some."""
        session, holdings, shares = self._session, self._session.participant.holdings, orders.shares
        committed = session.participant.committed
        self._waits_for = "copy"
        session.doing.works(REDUCTION, committed + 1)
        if shares.knows is not None:
            self._exchange.exponents(shares.knows)
            self._note(orders, lambda: holdings.informed(committed))
        coming = {unit for unit, _, to in shares.copies if to == holdings.me}
        # Includes units that this worker does not hold but sends to others, because any worker can create the initial
        # state of any unit.
        given = {unit for unit, source, _ in shares.copies if source == holdings.me}
        wanted = {self._stage.layout.number(unit) for unit in ({*holdings.mine} | given) - coming}
        for unit in wanted - self._optimizer.held.keys():
            self._optimizer.begin(unit)
        if shares.copies:
            self._faults.inject("heal", committed + 1)
        self._exchange.copies(shares, lambda unit: self._note(orders, lambda: holdings.took(unit)))
        self._note(orders, holdings.settled)
        self._optimizer.settled()
        if self._island is not None and orders.outer is not None:
            self._island.begin(orders.generation, orders.outer, shares.holders, holdings.me)
        if shares.knows is not None:
            self.send_weights(orders, committed)

    def send_weights(self, orders: Orders, step: int) -> None:
        """Sends the weights after `step` to the workers of the stage that do not hold them.

        A second call for the same generation and step does nothing.
        """
        if self._sent_weights == (orders.generation, step):
            return
        self._sent_weights = orders.generation, step
        holdings = self._session.participant.holdings
        if not orders.shares.together:
            self._waits_for = "copy"
            self._session.doing.works(REDUCTION, step + 1)
            self._faults.inject("spread", step)
            known = holdings.weights == step
            with named("recycle/weights"):
                self._exchange.weights(orders.shares, self._peers(orders), known)
        self._note(orders, lambda: holdings.gathered(step))

    def digests(self, orders: Orders) -> dict[str, str]:
        """Parameter name -> SHA-256 of its float32 master, for the whole stage."""
        if self._stage.flat.dtype == torch.float32:
            return self._stage.digests()
        self._waits_for = "copy"
        found: dict[str, str] = {}
        for name, master in self._exchange.masters(orders.shares, self._peers(orders)):
            found |= digests({name: master.cpu()})
        return found

    def sum_gradients(self, orders: Orders, step: int) -> None:
        """Sums the gradients out of place, because a death before the commit may require a second reduction."""
        doing = self._session.doing
        doing.works(REDUCTION, step)
        self._waits_for = "sum"
        self.reduced.pop(step, None)
        with self._spans.span(step, REDUCTION), named("recycle/reduce"):
            sent = partial(self._faults.fire, "allreduce", step)
            reduced = self._exchange.sum_gradients(orders.shares, self._peers(orders), sent)
        doing.works(REDUCTION, step)
        self._hold(orders, step, reduced)

    def copy(self, orders: Orders, step: int, source: Member) -> None:
        """Broadcasts the reduced gradient of `source`. Every peer calls this, even if it has the gradient already."""
        mine = self.reduced.get(step) if self._session.participant.record(step).reduced else None
        tensors = (
            mine.to_tensors() if mine else self._stage.gradients.reduced(self._stage.gradients.payload()).to_tensors()
        )
        self._waits_for = "copy"
        self._wait(self._session.links.broadcast(tensors, source))
        if mine is None:
            self._hold(orders, step, Reduced.from_tensors(tensors))

    def sum_tied_gradients(self, orders: Orders, step: int) -> None:
        """Adds other stages' sums to the gradients of tied units. Raises LinkBroken if the generation ends, Superseded
        if the orders have become invalid."""
        if self._exchange.tied.units:
            self._session.check(orders)
            self._waits_for = "sum"
            with named("recycle/ties"):
                self.reduced[step] = self._exchange.tied.reduce(
                    orders.shares, self.reduced[step], self._optimizer.exponents_of_sums
                )

    def _wait(self, pending: Pending, giver: Member | None = None) -> None:
        """Blocks until the message has arrived, and reports the wait. giver: the sender; None: all peers."""
        doing, step = self._session.doing, self._session.participant.committed + 1
        what = self._waits_for if giver is None else "tensor"
        peer = None if giver is None else self._session.links.members[giver]
        doing.waits(what, step, peer=peer, arrived=pending.arrived, lacks=pending.lacks)
        pending.wait()
        doing.works(REDUCTION, step)

    def vote(self, orders: Orders, step: int, logged_bytes: int) -> None:
        reduced, counts = self.reduced[step], self.reduced[step].counts.tolist()
        with self._session.lock:
            speaks = self._session.participant.speaks
        losses = reduced.losses.tolist() if self._stage.last else []
        self._faults.fire("vote", step)
        self._session.send(  # before the vote, so that the coordinator has it when it commits the step
            Measured(
                step=step,
                spans=pack(self._spans.take(step)),
                samples=self._samples(step, counts),
                logged_bytes=logged_bytes,
                lr=self._optimizer.lr(step),
                cpu=time.process_time(),
                memory=memory_used(self._stage.device),
            )
        )
        squares, finite, fits = reduced.squares, reduced.finite, reduced.fits
        checksums, changed = self._optimizer.inspected(reduced)  # both describe the state after the previous step
        held = array("q", checksums.values()).tobytes(), [self._stage.layout.ids[unit] for unit in changed]
        self._session.send(make_vote(orders.generation, step, squares, finite, fits, counts, losses, speaks, *held))

    def _samples(self, step: int, counts: list[float]) -> list[int]:
        """Sample ids in the gradient, with multiplicity. Every peer of the stage sends them. A single sender could die
        together with the coordinator, and then the step would be missing from the log."""
        if self._batches is None or not self._stage.first:
            return []
        return [i for g, n in enumerate(counts) for _ in range(int(n)) for i in self._batches.sample_ids(step, g)]

    def speculate(self, orders: Orders, step: int) -> bool:
        """Updates the parameters before the commit, if the gradient is finite and fits the fixed-point sums. Returns
        False if the worker must wait for the commit. Raises Superseded if the orders have become invalid.

        In each generation all peers call `send_weights` for the same step, some here and some after the commit. If the
        early update is rolled back, the coordinator orders all weights to be sent again (`Shares.knows`)."""
        speculates = self._steps_ahead(orders, step)
        if self._session.participant.applied == step:
            self.send_weights(orders, step)
        return speculates

    def _steps_ahead(self, orders: Orders, step: int) -> bool:
        if self._exchange.tied.units and not self._stage.gradients.reproducible:
            return False  # after a death another stage may repeat its sum, whose floats then differ in their last bits
        with self._session.lock:
            # Stops here if newer orders have arrived, because they may repeat the reduction.
            self._session.check(orders)
            participant, reduced = self._session.participant, self.reduced[step]
            if participant.committed != step - 1 or participant.applied != step - 1:
                return False
            if not (reduced.finite and reduced.fits):
                return False
            participant.speculate(step)  # before the update, so that a later revocation finds a step to roll back
        self._faults.fire("optimizer", step)
        self._session.doing.works(OpKind.OPTIMIZER, step)
        with self._spans.span(step + 1, OpKind.OPTIMIZER), named("recycle/O"):
            self._optimizer.speculate(self.reduced[step], step)
        return True

    def settle(
        self,
        undone: Callable[[int], None],
        forgotten: Callable[[int], None],
        decided: Callable[[Commit, Reduced], None],
        applied: Callable[[Commit, Reduced], None],
    ) -> None:
        """Rolls back an early update, restarts a step and applies commits, until nothing is pending. Callbacks:

        undone(step): the early update of this step was rolled back
        forgotten(step): this step restarts
        decided(commit, reduced): the exponents are already those after this commit; the state is updated next
        applied(commit, reduced): this commit was applied"""
        while self._session.pending():
            with self._session.lock:
                participant = self._session.participant
                if participant.worker.stage != self._stage.stage:
                    return  # this process now runs another stage, to which everything pending belongs
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
                self._apply(commit, speculated, partial(decided, commit, self.reduced[commit.step]))
                self._stage.gradients.clear()
                applied(commit, self.reduced.pop(commit.step))

    def _apply(self, commit: Commit, speculated: bool, decided: Callable[[], None]) -> None:
        outer = commit.outer
        if self._island is None or outer is None:
            return self._update(commit, speculated, decided)
        if outer.apply is not None:
            self._island.apply(outer)
        # If the outer step changes the state, a joiner cannot derive the new state from the gradient. `decided` is then
        # called last, so that donors send the state after all changes.
        self._update(commit, speculated, (lambda: None) if outer.changes_state else decided)
        if outer.cut:
            self._island.cut(outer)
        if outer.changes_state:
            decided()
        self._island.committed(outer, commit.step)

    def _update(self, commit: Commit, speculated: bool, decided: Callable[[], None]) -> None:
        if speculated:
            decided()
            self._optimizer.confirm()
            return
        if commit.scale is None:
            self._optimizer.step(self.reduced[commit.step], commit.step, None, decided)
            return
        self._faults.fire("optimizer", commit.step)
        with self._spans.span(commit.step + 1, "O"), named("recycle/O"):
            self._optimizer.step(self.reduced[commit.step], commit.step, commit.scale, decided)

    def _hold(self, orders: Orders, step: int, reduced: Reduced) -> None:
        """Stores the gradient. Raises Superseded if the orders have become invalid, because this worker has then
        reported that it does not have the gradient."""
        with self._session.lock:
            self._session.check(orders)
            self.reduced[step] = reduced
            self._session.participant.record(step).reduced = True

    def _peers(self, orders: Orders) -> list[Member]:
        """The live members of the stage."""
        with self._session.lock:
            self._session.check(orders)
            return self._session.participant.peers

    def _note(self, orders: Orders, change: Callable[[], None]) -> None:
        """Calls `change`. Raises Superseded if the orders have become invalid, because the report for the new
        generation was then sent without the change."""
        with self._session.lock:
            self._session.check(orders)
            change()
