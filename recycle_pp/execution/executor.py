"""Runs a plan's actions on one worker: compute, sends, receives, the stage's reduction, the optimizer.

    executor = Executor(session, stage, commits, mailbox, batches, faults, spans, settings)
    executor.run()                    # until the end of the job, or until this process must run another stage

The executor makes no decisions. It follows the orders of the session. When the orders become invalid, it stops after
the current op, keeps all completed work, and continues with the next orders. In a recovery a survivor therefore loses
only the time it spends waiting.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from recycle_schedules import Action, MicroBatch, OpKind, Tensor
from recycle_schedules.ops import input_of, output_of

from recycle_pp.comm.waiting import LinkBroken
from recycle_pp.config.settings import Settings
from recycle_pp.data.batches import Batches
from recycle_pp.model.stage import Stage
from recycle_pp.model.stage_module import Batch
from recycle_pp.numerics.gradients import Reduced
from recycle_pp.protocol.participant import Orders
from recycle_pp.wire.messages.generations import LinksMeasured
from recycle_pp.wire.messages.members import Member
from recycle_pp.wire.messages.steps import Commit

from .commits import Commits
from .device import give_back_free_memory
from .injection import Injector
from .link_probes import measure
from .mailbox import Mailbox
from .session import Session, Superseded
from .spans import AHEAD, Spans, named
from .validation import validate


@dataclass
class Executor:
    """Runs the session's orders for one stage.

    on_decision  called with (commit, reduced) before a committed step is applied; the exponents are already updated
    on_commit  called with (commit, reduced) after a committed step was applied
    on_vote    called with (step, generation, number of the attempt, reduced) before each vote
    on_finish  called with the orders in every generation, once no steps are left
    relayout   called with all layers of the stage if they change, before any work in a generation
    in_stream  whether the device itself sends and receives (NCCL). Otherwise messages go through the host, so an op
               must be done before the host reads its output or writes the next input
    """

    session: Session
    stage: Stage
    commits: Commits
    mailbox: Mailbox
    batches: Batches
    faults: Injector
    spans: Spans
    settings: Settings
    on_decision: list[Callable[[Commit, Reduced], None]] = field(default_factory=list)
    on_commit: list[Callable[[Commit, Reduced], None]] = field(default_factory=list)
    on_vote: list[Callable[[int, int, int, Reduced], None]] = field(default_factory=list)
    on_finish: Callable[[Orders], None] = lambda orders: None
    relayout: Callable[[list[int]], None] = lambda layers: None
    in_stream: bool = False
    _link_times: dict[str, tuple[float, float]] = field(default_factory=dict)  # by host, see `LinksMeasured`

    def run(self) -> str:
        """Runs until there is a reason to stop, and returns the reason: "done" (the job has ended), "left" (this worker
        has left the job) or "cast" (this process must take over the worker of another stage)."""
        self.session.busy = self.spans.left
        while self.session.participant.worker.stage == self.stage.stage:
            self.spans.observe()
            self._settle()
            orders = self.session.orders()
            if self.session.over is not None:
                return self.session.over
            if orders is None or orders.worker.stage != self.stage.stage or self.session.pending():
                continue
            try:
                self._follow(orders)
            except Superseded:
                pass
            except LinkBroken as error:
                self.session.broken(orders, error)
            except RuntimeError as error:
                self.spans.locate(error)
                raise
        return "cast"

    def _follow(self, orders: Orders) -> None:
        """Runs all remaining steps. Ends only by an exception, when the orders become invalid."""
        self.session.links.follow(orders.generation)
        self.session.reached("followed")
        self.mailbox.void()
        if orders.layers != [*self.stage.layout.layers]:
            self.relayout(orders.layers)
            self.session.reached("relaid")
        step = self.session.participant.committed + 1
        if orders.probes:
            self._measure_links(orders, step)
        self.commits.begin(orders)
        if orders.evaluate is not None:
            validate(self.session, orders, self.stage, self.mailbox, self.batches, self.faults, orders.evaluate)
        if orders.copy is not None:
            self.commits.copy(orders, step, orders.copy)
        while step < self.settings.run.steps:
            actions = self.session.actions(orders, step)
            if self.settings.model.recompute == "auto":
                self.stage.module.recompute = self.session.recomputes(orders, step)
            self._run_step(orders, step, actions)
            step += 1
        self.session.resumed(orders)
        self.on_finish(orders)
        while True:  # no steps are left, but the coordinator may still announce a generation
            self.session.wait_commit(orders)

    def _measure_links(self, orders: Orders, step: int) -> None:
        me, doing, links = self.session.participant.member, self.session.doing, self.session.links
        doing.waits("links", step)

        def waits(partner: Member) -> None:
            doing.waits("links", step, peer=links.members[partner])

        self._link_times |= measure(links, me, orders.probes, self.stage.device, waits)
        self.session.send(LinksMeasured(socket.gethostname(), self._link_times))

    def _run_step(self, orders: Orders, step: int, actions: list[Action]) -> None:
        self.faults.arm(step, actions)
        doing = self.session.doing
        doing.waits("links", step)
        self.mailbox.connect(actions)
        doing.works("turn", step)
        for action in actions:
            self._settle(orders)
            if action.kind.computes:
                self._compute(orders, step, action)
            elif action.kind is OpKind.REDUCE:
                self._await_turn(orders, step)
                self.spans.observe()
                self._give_back()
                self.commits.sum_gradients(orders, step)
            elif action.peer is not None:  # a message; the only other kind, the optimizer step, runs at the commit
                if action.kind.makes:
                    self.mailbox.post(step, action.tensor, action.peer)
                else:
                    if not self.in_stream:
                        self.spans.observe()
                    doing.works("send", step, action.microbatch)
                    self.mailbox.ship(step, action.tensor, action.peer)
                    doing.works("turn", step, action.microbatch)
                self.faults.fire(action.kind, step)
        self._await_turn(orders, step)
        self.spans.observe()
        self.commits.sum_tied_gradients(orders, step)
        attempt = self.session.participant.attempt.coarser
        for hook in self.on_vote:
            hook(step, orders.generation, attempt, self.commits.reduced[step])
        self.commits.vote(orders, step, self.mailbox.log.bytes)
        if orders.stagger and not self._is_barrier(step) and self.commits.speculate(orders, step):
            return
        if step > self.session.participant.committed:
            self.session.resumed(orders)
            self.session.wait_commit(orders)
        self._settle(orders)

    def _compute(self, orders: Orders, step: int, action: Action) -> None:
        kind, mb, stage, stages = action.kind, action.microbatch, self.stage.stage, self.settings.parallel.stages
        assert mb is not None
        if kind.adds_gradient:
            self._await_turn(orders, step)
        takes = input_of(kind, mb, stage, stages)
        makes = output_of(kind, mb, stage, stages)
        source: Sequence[torch.Tensor] = ()
        if takes:
            source = self._take(step, takes, mb)
        with self.session.lock:
            self.session.check(orders)
            record = self.session.participant.record(step)
            record.begin(kind, mb)
        self.session.resumed(orders)
        if news := self.spans.news(step, kind, mb):
            self.session.send(news)

        def done() -> None:
            with self.session.lock:
                record.finish()

        with self.spans.launch(step, kind, mb, done), named(f"recycle/{kind}"):
            output = self._apply(kind, step, mb, source)
            self.faults.drag(self.spans.spent)
            self.faults.fire(kind, step)
        self.session.doing.works("turn", step, mb)
        if makes:
            self.mailbox.keep(step, makes, output)
        if takes:
            self.mailbox.consume(step, takes)
        self.spans.observe(AHEAD)

    def _take(self, step: int, takes: Tensor, mb: MicroBatch) -> Sequence[torch.Tensor]:
        """Blocks until the input has arrived. Meanwhile observes the launched ops, to attribute a hang to them."""
        awaited = self.mailbox.awaited(step, takes)
        if not self.in_stream:
            self.spans.observe()
        elif awaited:
            self.spans.observe(until=awaited[1].arrived)
        if awaited:
            giver, pending = awaited
            self.session.doing.waits("tensor", step, mb, giver, pending.arrived)
        with named("recycle/wait"):
            return self.mailbox.take(step, takes)

    def _apply(self, kind: OpKind, step: int, mb: MicroBatch, source: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        g, stage = mb[0] * self.settings.parallel.microbatches + mb[1], self.stage
        batch = None
        if kind is OpKind.FORWARD and stage.module.reads:
            self.session.doing.works("data", step, mb)
            batch = self._batch(step, g)
        self.session.doing.works(kind, step, mb)
        if kind is OpKind.FORWARD:
            return stage.forward(step, g, batch, source)
        if kind is OpKind.BACKWARD_INPUT:
            return stage.backward_input(g, source)
        if kind is OpKind.BACKWARD:
            return stage.backward(g, source)
        stage.backward_weight(g)
        return []

    def _batch(self, step: int, g: int) -> Batch:
        batch = self.batches.batch(step, g)
        return batch.of_step(self.batches.items(step)) if self.stage.last else batch

    def _give_back(self) -> None:
        """Returns the memory of freed activations to the system if memory is limited, because the end of the step
        allocates memory."""
        if self.settings.parallel.memory is not None:
            give_back_free_memory()

    def _await_turn(self, orders: Orders, step: int) -> None:
        """Waits for the commit of the previous step, because the accumulators hold its gradients until then."""
        while step > self.session.participant.committed + 1:
            self.spans.observe()
            self.session.wait_commit(orders)
            self._settle(orders)
        self._settle(orders)

    def _settle(self, orders: Orders | None = None) -> None:
        """Applies pending commits. With `orders`, also sends the new weights and runs validations that are due. Raises
        Superseded if the orders have become invalid."""
        applied, validations = self._apply_commits() if self.session.pending() else (False, [])
        if orders is not None:
            self.session.check(orders)
            if applied or validations:
                self.spans.observe()
            if applied:
                self.commits.send_weights(orders, self.session.participant.applied)
            for step in validations:
                validate(self.session, orders, self.stage, self.mailbox, self.batches, self.faults, step)

    def _apply_commits(self) -> tuple[bool, list[int]]:
        """Applies pending commits. Returns (whether a commit was applied, the steps after which the job validates)."""
        validations: list[int] = []
        committed: list[int] = []

        def undone(step: int) -> None:
            self.spans.observe()
            self.stage.drop_flights()
            self.mailbox.forget_after(step)
            self.spans.forget_after(step)

        def forgotten(step: int) -> None:
            undone(step - 1)

        def decided(commit: Commit, reduced: Reduced) -> None:
            for hook in self.on_decision:
                hook(commit, reduced)

        def applied(commit: Commit, reduced: Reduced) -> None:
            self.mailbox.close(commit.step)
            if commit.changes:
                self.settings = self.settings.with_values(commit.changes)
            if commit.savers:
                self.session.doing.works("checkpoint", commit.step)
                self._give_back()
            for hook in self.on_commit:
                hook(commit, reduced)
            self.faults.inject("commit", commit.step)
            committed.append(commit.step)
            if commit.evaluate:
                validations.append(commit.step)

        self.commits.settle(undone, forgotten, decided, applied)
        return bool(committed), validations

    def _is_barrier(self, step: int) -> bool:
        """Whether the worker must wait for the commit of this step, because the job then validates, saves or ends."""
        s = self.settings
        every = [n for n in (s.run.validate_every, s.checkpoint.every) if n]
        return step == s.run.steps - 1 or any((step + 1) % n == 0 for n in every)
