"""The worker's side of the recovery protocol: what it has done, what it may do next, what it answers.

    me = Participant(Worker(1, 2), stages=4)
    me.announce(message)            # a new generation: returns the report that answers it
    me.adopt(message)               # the plan of that generation: `me.orders` is what to run
    me.commit(message)              # the job has agreed on a step: `me.commits` waits to be applied
    me.state(linked=True)           # all that a new coordinator needs to know of it

Pure and not thread-safe: the worker calls it under one lock (control thread and executor share it), the simulator in
the tests calls it directly. Which optimizer steps are *committed* (agreed by the job) and which are *applied* (in the
parameters) is kept apart: `applied` runs behind after a commit that still waits for the executor, and one ahead while
the staggered optimizer speculates.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from recycle_schedules import Action, Worker, unpack

from recycle_pp.wire.messages.table import is_void
from recycle_pp.wire.messages.workers import FIRST, Adopt, Announce, Attempt, Commit, Report, Shares, State, SteadyPlan

from .holdings import Holdings
from .ledger import Record


@dataclass
class Orders:
    """What one worker runs in a generation.

    steps   per unfinished step, oldest first: (step, actions of its remainder)
    steady  the actions of every later step, forward: those of a validation; None until the coordinator's `plan` is here
    copy    the stage's reduced gradients come from this peer (a broadcast), they are not summed again
    evaluate  the validation that has to be (re)done first, or None
    probes  with whom to measure the link to a host before anything else
    shares  which workers of the stage hold which units of its state
    recompute  whether layers run again in the backward: in `steps`, in `steady`
    """

    generation: int
    steps: dict[int, list[Action]]
    steady: list[Action] | None
    forward: list[Action] | None
    copy: Worker | None
    evaluate: int | None
    stagger: bool
    probes: dict[str, Worker]
    shares: Shares
    recompute: tuple[bool, bool] = (False, False)


@dataclass
class Participant:
    worker: Worker
    stages: int
    holdings: Holdings = field(default_factory=lambda: Holdings(0, [], -1))  # its units, once the stage is built
    generation: int = -1
    committed: int = -1  # newest step the job has agreed on
    applied: int = -1  # newest step in the parameters
    records: dict[int, Record] = field(default_factory=dict)
    commits: list[Commit] = field(default_factory=list)  # agreed, not yet applied
    orders: Orders | None = None  # None: wait
    undo: bool = False  # the executor must take back its speculative step before anything else
    attempt: Attempt = FIRST  # at the step after `committed`
    again: bool = False  # the executor must forget what it has summed in that step, before anything else but `undo`
    announced: Announce | None = None  # the newest announcement
    agreed: tuple[int, int] = (-1, -1)  # term and number of the newest generation that was agreed
    members: list[Worker] = field(default_factory=list)  # of that generation
    last: Commit | None = None  # the newest commit

    def record(self, step: int) -> Record:
        return self.records.setdefault(step, Record(step))

    @property
    def speaks(self) -> bool:
        """The first member of its stage: it says for its peers what all of them know."""
        assert self.announced is not None
        return self.worker == min(w for w in self.announced.members if w.stage == self.worker.stage)

    # -- what the coordinator says -----------------------------------------------------------------------------

    def announce(self, message: Announce, busy: float = 0.0) -> Report:
        """A new generation. Everything of the old one is void but what is done; returns the report."""
        joined = self.generation < 0
        self.generation, self.announced = message.generation, message
        self.committed = max(self.committed, message.committed)  # news only to a worker that has just joined
        if joined:  # it has followed its units up to here, and gets what it lacks in this generation
            self.applied = self.committed
            self.holdings.join(self.committed)
        self.orders = None
        if message.attempt > self.attempt:
            if message.attempt.mended > self.attempt.mended:
                self.holdings.distrust(self.committed)
            self.attempt, self.again = message.attempt, True
            self._forget_after(self.committed)
            self._take_back(self.committed)
        return self.report(busy)

    def report(self, busy: float) -> Report:
        """`busy`: seconds until this worker can start its next op."""
        open_steps = [r.reported() for step, r in sorted(self.records.items()) if step > self.committed]
        ahead = self.applied > self.committed and not self.undo
        return Report(self.generation, open_steps, ahead=ahead, busy=busy, holds=self.holdings.reported())

    def state(self, linked: bool) -> State:
        """What `takeover.find` asks for. linked: the links of the present generation stand."""
        announced = self.announced
        return State(
            generation=self.generation,
            agreed=self.agreed,
            members=self.members,
            base=announced.base if announced and linked else None,
            committed=self.committed,
            commit=self.last,
            attempt=self.attempt,
        )

    def adopt(self, message: Adopt) -> None:
        """The plan of a generation, unless it is void already. A revoked stage takes its reduced gradients back."""
        if is_void(message, self.generation) or message.term < self.agreed[0]:
            return
        assert self.announced is not None
        self.agreed, self.members = (message.term, message.generation), self.announced.members
        self.holdings.adopt(message.shares)
        if message.revoked:
            record = self.records.get(self.committed + 1)
            if record and self.worker.stage in message.revoked:
                record.reduced = False
            self._forget_after(self.committed + 1)
            self._take_back(self.committed)
        self.orders = Orders(
            generation=message.generation,
            steps={step: unpack(actions) for step, actions in message.steps.items()},
            steady=None,
            forward=None,
            copy=message.copy,
            evaluate=message.evaluate,
            stagger=message.stagger,
            probes=message.probes,
            shares=message.shares,
            recompute=(message.recompute, False),
        )

    def plan(self, message: SteadyPlan) -> None:
        """What to run in every step that nothing has broken."""
        if self.orders is not None and not is_void(message, self.generation):
            self.orders.steady, self.orders.forward = unpack(message.steady), unpack(message.forward)
            self.orders.recompute = self.orders.recompute[0], message.recompute

    def commit(self, message: Commit) -> None:
        """The job has agreed on a step. Its record is closed: logs and accumulators may go once it is applied."""
        step = message.step
        if step <= self.committed:  # sent twice: to the new connection, and again because an earlier State lacked it
            return
        assert step == self.committed + 1, (step, self.committed)
        self.committed, self.last, self.attempt = step, message, FIRST
        self.records.pop(step, None)
        self.commits.append(message)
        self.holdings.commit(step, [w.pipeline for w in message.savers if w.stage == self.worker.stage])
        if self.orders is not None:
            self.orders.stagger = message.stagger
            if message.replan:  # a better plan is on its way, for the next step on
                self.orders.steady = self.orders.forward = None
        if message.hold:
            self.orders = None
        if message.void:  # the update was not what the speculation had assumed
            self._forget_after(step)
            self._take_back(step - 1)

    def followed(self, step: int, units: Collection[int]) -> None:
        """Not a member yet: it has the state of these units after that step."""
        self.applied = self.committed = step
        self.holdings.followed(step, units)

    # -- what the executor does --------------------------------------------------------------------------------

    def next_commit(self) -> Commit | None:
        """The oldest commit that the executor has to apply (or to confirm, if `applied` is there already)."""
        return self.commits.pop(0) if self.commits else None

    def speculate(self, step: int) -> None:
        """The executor has applied a step that the job has not agreed on yet."""
        assert step == self.applied + 1 == self.committed + 1
        self.applied = step

    def taken_back(self) -> None:
        """The executor has undone its speculative step."""
        self.undo = False
        self.applied -= 1

    def begins_again(self) -> None:
        """The executor has forgotten the step under way."""
        self.again = False

    def _take_back(self, stands: int) -> None:
        """The executor has to undo what it has applied after that step."""
        if self.applied > stands:
            self.undo = True
            self.holdings.taken_back(self.committed)

    def _forget_after(self, step: int) -> None:
        """Work on parameters that turned out wrong is worth nothing."""
        for later in [k for k in self.records if k > step]:
            del self.records[later]
