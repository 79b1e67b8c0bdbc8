"""The worker's side of the recovery protocol: completed work, orders and answers.

    me = Participant(6, Worker(1, 2))    # member 6 plays worker 1.2
    me.announce(message)            # a new generation; returns the report
    me.adopt(message)               # stores the generation's orders in `me.orders`
    me.followed(step, units)        # units of layers that the stage will gain have arrived
    me.understudy = Understudy(...) # the member follows the units of another stage, which it may have to take over
    me.commit(message)              # a step is committed; `me.commits` keeps the message until the step is applied
    me.state(linked=True)           # the state of this worker, for a new coordinator

Pure and not thread-safe. The worker's control thread and executor call it under one shared lock; the tests' simulator
calls it directly. *Committed* steps are agreed by the job; *applied* steps are in the parameters. `applied` is behind
`committed` until the executor applies the commit, and one step ahead while the staggered optimizer speculates.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from recycle_schedules import Action, Worker, unpack

from recycle_pp.wire.messages.generations import (
    FIRST,
    Adopt,
    Announce,
    Attempt,
    Holds,
    Report,
    Shares,
    SteadyPlan,
)
from recycle_pp.wire.messages.islands import OuterState
from recycle_pp.wire.messages.members import Assignment, Member
from recycle_pp.wire.messages.steps import Commit
from recycle_pp.wire.messages.table import is_void
from recycle_pp.wire.messages.units import Layout, UnitId, packed, unpacked
from recycle_pp.wire.messages.workers import State

from .holdings import NOTHING, Holdings
from .ledger import Record
from .understudy import Understudy


@dataclass
class Orders:
    """A worker's orders in a generation.

    worker     the worker that this member plays; the executor may still run the stage of its previous worker
    steps      step -> actions left in that step, for unfinished steps, oldest first
    steady     actions of every later step; None until the coordinator's `plan` arrives
    forward    actions of a validation; None until that `plan` arrives
    copy       member that broadcasts the stage's reduced gradients, so that they are not reduced again; None: reduce
    evaluate   step of the validation to run or repeat first; None: no validation
    probes     host -> a member on it; the links to these members are measured before anything else
    shares     holders of the stage's units
    layers     layers of the stage in this generation; the executor may still have those of an earlier generation
    recompute  (in `steps`, in `steady`): whether layers run again in the backward pass
    outer      for an island, its position in the rounds; else None
    """

    generation: int
    worker: Worker
    steps: dict[int, list[Action]]
    steady: list[Action] | None
    forward: list[Action] | None
    copy: Member | None
    evaluate: int | None
    stagger: bool
    probes: dict[str, Member]
    shares: Shares
    layers: list[int]
    recompute: tuple[bool, bool] = (False, False)
    outer: OuterState | None = None


@dataclass
class Participant:
    member: Member
    worker: Worker
    # Units of this worker; empty until its stage is built.
    holdings: Holdings = field(default_factory=lambda: Holdings(0, [], -1))
    generation: int = -1
    committed: int = -1  # newest committed step
    applied: int = -1  # newest step that has updated the parameters
    records: dict[int, Record] = field(default_factory=dict)
    commits: list[Commit] = field(default_factory=list)  # committed, not yet applied
    orders: Orders | None = None  # None: wait for orders
    undo: bool = False  # whether the executor must undo its early update before it continues
    attempt: Attempt = FIRST  # attempt at the step after `committed`
    again: bool = False  # whether the executor must restart the next step, after `undo`
    announced: Announce | None = None  # the newest announcement
    agreed: tuple[int, int] = (-1, -1)  # term and number of the newest agreed generation
    members: Assignment = field(default_factory=dict)  # members of that generation
    layout: Layout = field(default_factory=dict)  # the layers of every stage in that generation
    last: Commit | None = None  # the newest commit
    understudy: Understudy | None = None  # the copy of another stage that this member follows, if any

    def record(self, step: int) -> Record:
        return self.records.setdefault(step, Record(step))

    @property
    def speaks(self) -> bool:
        """Whether this is the lowest member of its stage, whose vote contains the values for all peers."""
        return self.member == self.peers[0]

    @property
    def peers(self) -> list[Member]:
        """The members of this worker's stage in the announced generation, this one included, ascending."""
        assert self.announced is not None
        return sorted(m for m, worker in self.announced.members.items() if worker.stage == self.worker.stage)

    # -- messages from the coordinator -------------------------------------------------------------------------

    def announce(self, message: Announce, busy: float = 0.0) -> Report:
        """Starts a new generation: drops the old orders, keeps completed work. Returns the report."""
        joined = self.generation < 0
        self.generation, self.announced = message.generation, message
        # Only a new member takes `committed` from the message. Others may still lack that commit, and receive it again.
        if joined:  # a joiner has only its own units so far; this generation sends it the other weights
            self.committed = self.applied = max(self.committed, message.committed)
            self.holdings.join(self.committed)
        self.orders = None
        if message.attempt > self.attempt:
            if message.attempt.repaired > self.attempt.repaired:
                self.holdings.distrust(self.committed)
            self.attempt, self.again = message.attempt, True
            self._forget_after(self.committed)
            self._take_back(self.committed)
        return self.report(busy)

    def report(self, busy: float) -> Report:
        """The answer to the announced generation. busy: seconds until this worker can start its next op."""
        assert self.announced is not None
        if self.role != self.worker:
            return Report(self.generation, [], ahead=False, busy=busy, holds=self._understood())
        open_steps = [r.reported() for step, r in sorted(self.records.items()) if step > self.committed]
        ahead = self.applied > self.committed and not self.undo
        layers = self.announced.layout.get(self.worker.stage)
        holds = self.holdings.reported(layers, self.announced.committed)
        return Report(self.generation, open_steps, ahead=ahead, busy=busy, holds=holds)

    def state(self, linked: bool) -> State:
        """The input of `takeover.find`. linked: whether the links of the current generation are up."""
        announced = self.announced
        return State(
            generation=self.generation,
            agreed=self.agreed,
            members=self.members,
            base=announced.base if announced and linked else None,
            committed=self.committed,
            commit=self.last,
            attempt=self.attempt,
            layout=self.layout,
            understudy=None if self.understudy is None else self.understudy.state,
        )

    def adopt(self, message: Adopt) -> list[int]:
        """Stores the orders of a generation. Ignores orders of another generation or of an earlier term. Returns the
        checkpoints, by number of steps, of which this member should have saved a part, but will not because it now
        plays another worker. The caller must report them, because the coordinator waits for these parts.

        If this worker's stage must reduce its gradients again (`Adopt.revoked`), drops the reduced gradients."""
        unsaved: list[int] = []
        if is_void(message, self.generation) or message.term < self.agreed[0]:
            return unsaved
        assert self.announced is not None
        self.agreed = message.term, message.generation
        self.members, self.layout = self.announced.members, self.announced.layout
        if self.role != self.worker:
            unsaved = [commit.step + 1 for commit in self.commits if self.member in commit.savers]
            self._take_role(self.role)
        self.holdings.adopt(message.shares)
        if message.revoked:
            record = self.records.get(self.committed + 1)
            if record and self.worker.stage in message.revoked:
                record.reduced = False
            self._forget_after(self.committed + 1)
            self._take_back(self.committed)
        self.orders = Orders(
            generation=message.generation,
            worker=self.worker,
            steps={step: unpack(actions) for step, actions in message.steps.items()},
            steady=None,
            forward=None,
            copy=message.copy,
            evaluate=message.evaluate,
            stagger=message.stagger,
            probes=message.probes,
            shares=message.shares,
            layers=self.layout.get(self.worker.stage, []),
            recompute=(message.recompute, False),
            outer=message.outer,
        )
        return unsaved

    def plan(self, message: SteadyPlan) -> None:
        """Stores the plan for all later steps that no death interrupts."""
        if self.orders is not None and not is_void(message, self.generation):
            self.orders.steady, self.orders.forward = unpack(message.steady), unpack(message.forward)
            self.orders.recompute = self.orders.recompute[0], message.recompute

    def commit(self, message: Commit) -> None:
        """Stores a commit and closes the record of its step. Logs and accumulators can be dropped once the step is
        applied."""
        step = message.step
        if step <= self.committed:  # resent: on a new connection, or because an earlier State lacked this commit
            return
        assert step == self.committed + 1, (step, self.committed)
        self.committed, self.last, self.attempt = step, message, FIRST
        self.records.pop(step, None)
        self.commits.append(message)
        self.holdings.commit(step, message.savers)
        if self.understudy is not None:
            self.understudy.committed(message)
        if self.orders is not None:
            self.orders.stagger = message.stagger
            if message.replan:  # a better plan follows, which starts with the next step
                self.orders.steady = self.orders.forward = None
        if message.hold:
            self.orders = None
        if message.void:  # the update differs from the speculative one
            self._forget_after(step)
            self._take_back(step - 1)

    def caught_up(self, step: int, units: Collection[UnitId]) -> None:
        """Records that a joiner has these units in their state after `step`."""
        self.applied = self.committed = step
        self.holdings.caught_up(step, units)

    def followed(self, step: int, units: Collection[UnitId]) -> None:
        """Records that `units` of layers that this member's stage will gain have arrived, in their state after `step`.
        Replaces the units of earlier calls. An empty call at the beginning of a new session drops them."""
        self.holdings.arriving = step, set(units)

    def relayout(self, units: Collection[UnitId]) -> None:
        """Records that the worker's stage now has different layers. units: all units of the stage, in its order."""
        self.holdings.relayout(units, self.committed)

    # -- calls of the executor ---------------------------------------------------------------------------------

    def next_commit(self) -> Commit | None:
        """Removes and returns the oldest commit that is not applied; None if there is none. If the executor has applied
        the step early, it only confirms the commit."""
        return self.commits.pop(0) if self.commits else None

    def speculate(self, step: int) -> None:
        """Records that the executor applies a step before its commit."""
        assert step == self.applied + 1 == self.committed + 1
        self.applied = step

    def taken_back(self) -> None:
        """Records that the executor has rolled back its early update."""
        self.undo = False
        self.applied -= 1

    def begins_again(self) -> None:
        """Records that the executor has restarted the step."""
        self.again = False

    # -- another role ------------------------------------------------------------------------------------------

    @property
    def role(self) -> Worker:
        """The worker that this member plays in the announced generation. Tentative until that generation is adopted."""
        return self.worker if self.announced is None else self.announced.members.get(self.member, self.worker)

    def _understood(self) -> Holds:
        """The units that this member holds of the stage that it must take over. It holds all of them if its copy is in
        the state after the newest committed step, otherwise none."""
        followed = self.understudy
        if followed is None or followed.worker.stage != self.role.stage or followed.step != self.committed:
            return Holds([], None, NOTHING)
        return Holds(packed(followed.units), None, self.committed)

    def _take_role(self, worker: Worker) -> None:
        """Switches to a worker of another stage, with the state of that stage that this member has followed. Drops all
        work and state of the old stage, whose other workers redo the work."""
        holds, followed = self._understood(), self.understudy
        self.worker, self.understudy = worker, None
        self.holdings = Holdings(self.member, followed.units if followed else [], None)
        self.holdings.units, self.holdings.weights = set(unpacked(holds.units)), holds.weights
        self.records.clear()
        self.commits.clear()
        self.applied, self.undo, self.again = self.committed, False, self.attempt.coarser > 0

    def _take_back(self, step: int) -> None:
        """Makes the executor undo updates after `step`."""
        if self.applied > step:
            self.undo = True
            self.holdings.taken_back(self.committed)

    def _forget_after(self, step: int) -> None:
        """Drops the records of steps after `step`, because these steps ran with wrong parameters."""
        for later in [k for k in self.records if k > step]:
            del self.records[later]
