"""The coordinator's side of the recovery protocol: live workers, generations, orders, commits.

    job = Job(problem, steps=100, planner=plan, derive=actions)
    outcome = job.handle(WorkerReady(member))       # every event, see `events`
    if job.wants_plan:
        job.steady.plan(problem := job.problem_now())       # may take long; runs in a thread
        outcome = job.handle(PlanMade(problem))

A pure state machine: no sockets, no clock, no torch. The coordinator feeds it real messages; the tests feed it every
possible order of events. All membership changes use the same three messages:

    announce   to every member: a new generation and its members; messages of the old one are void
    report     from every member: its completed ops, the units that it holds, and when it can start its next op
    adopt      to every member: actions for the rest of the interrupted step; a `plan` for later steps follows

A step ends with a `vote` from every live member and a `commit` to every live member. If finite gradients did not fit
the fixed-point sums, or a worker's state was wrong, a new generation repeats the step instead. A death at any point,
even while reports are collected, starts another generation, which replaces the current one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from recycle_schedules import Plan, Problem, Worker
from recycle_schedules.in_flight import peak

from recycle_pp.wire.messages.ctl import Value
from recycle_pp.wire.messages.generations import FIRST, Announce, Report
from recycle_pp.wire.messages.islands import CutMissing, RoundGoal, RoundReady
from recycle_pp.wire.messages.lifecycle import Leave, NoRoom, Prepared, StreamLost, Synced
from recycle_pp.wire.messages.members import Assignment, Member
from recycle_pp.wire.messages.saving import Finished
from recycle_pp.wire.messages.steps import Commit, Evaluated, Vote
from recycle_pp.wire.messages.table import Message, is_void

from .adoption import Derive, adopt
from .assignment import completed, exchanged, initial, refilled
from .ballot import Ballot, ProtocolViolation
from .events import (
    CoordinatorReplaced,
    EndRequested,
    Event,
    HoldExpired,
    Json,
    LinksBroken,
    MessageReceived,
    MoveWanted,
    Outcome,
    PlanMade,
    ProblemChanged,
    Restarted,
    SavingChanged,
    Send,
    SettingsChanged,
    WorkerDescribed,
    WorkerDied,
    WorkerEvicted,
    WorkerReady,
    WorkerReturned,
)
from .followers import Followers
from .live_problem import LiveProblem
from .moving import Moving
from .outer_rounds import OuterRounds
from .speculation import Speculation
from .stage_lost import StageLost
from .steady_state_plan import Planner, Steady
from .understudies import Understudies
from .units import Units
from .validation import Validation


@dataclass
class Job:
    """The coordinator's state of a job, which `handle` changes.

    problem  the planning problem without deaths; its durations and limits may change while the job runs
    steps    number of steps of the job
    planner  returns a plan for a problem
    derive   returns the actions of all workers for a plan
    clip     maximum norm of the gradient; None: no clipping
    stagger  whether workers may apply a step before its commit (optimizer.stagger)
    """

    problem: Problem
    steps: int
    planner: Planner
    derive: Derive
    clip: float | None = None
    stagger: bool = False
    copies: int = 0  # copies of each unit of a stage's state (parallel.copies); 0: one for each worker of the stage
    understudy: int = 0  # bytes per element of an understudy's copy of a stage (state.understudy); 0: no understudies
    third: bool = False  # whether to continue without a worker whose copy is wrong (control.mismatch)
    first_step: int = 0
    evaluate_every: int = 0
    evaluate_microbatches: int = 1  # micro-batches of each pipeline in one pass of a validation
    save_every: int = 0
    changes: dict[str, Value] = field(default_factory=dict)  # settings that were changed while the job ran
    islands: tuple[int, int, int] | None = None  # for an island: steps, delay and max_local, see `OuterRounds`

    generation: int = -1
    committed: int = -1
    assignment: Assignment = field(default_factory=dict)  # of all members, dead or alive; by default `initial`
    waiting: set[Member] = field(default_factory=set)  # members that the first generation waits for; by default all

    def __post_init__(self) -> None:
        self.committed = max(self.committed, self.first_step - 1)
        self.assignment = self.assignment or initial(self.problem.pipelines, self.problem.stages)
        self.waiting = set(self.waiting) or set(self.assignment)
        self.phase = "starting"  # | reporting | running | holding (waits for followers) | ended | finished | lost
        self.attempt = FIRST  # attempt at the next step
        self.live: set[Member] = set()
        self.leaving: set[Member] = set()  # members that leave at the next commit
        self.finished: set[Member] = set()
        self.skipped = 0  # consecutive skipped updates, up to the newest commit
        self.remainder_plans: dict[int, Plan] = {}  # step -> plan, from the last adoption
        self._peaks: dict[Worker, float] = {}  # worker that died -> its peak of micro-batches in flight in the plans
        self._reports: dict[Member, Report] = {}
        self._live_problem = LiveProblem()
        self.units, self.followers = Units(self.copies, self.third), Followers()
        self.moving = Moving(self.units, self.followers)
        self.understudies = Understudies(self.followers, self.understudy)
        self.steady = Steady(self.planner, self.evaluate_microbatches)
        self._newest: Commit | None = None
        self._base: int | None = None  # newest generation that rebuilt all links
        self._speculation = Speculation(self.stagger)
        self._validation = Validation()
        self.outer = None if self.islands is None else OuterRounds(*self.islands)
        self._wrong: dict[Member, str] = {}  # member that was removed but is still alive -> fault in its state
        self.saving = SavingChanged(occupied=False, due=False)  # newest event of this type
        self._ending = False  # whether the next commit will be the last one
        self._notes: list[Json] = []  # notes of the current event
        self._expiry: HoldExpired | None = None  # expiry of the current event
        self._new_ballot()

    @property
    def started(self) -> bool:
        """Whether the first generation has been announced."""
        return self._base is not None

    @property
    def waits_for_round(self) -> bool:
        """Whether all workers have voted, and the commit waits for the result of a round (`OuterRounds.waits`)."""
        waits = self.outer is not None and self.outer.waits(self.live, self.committed + 1)
        return waits and not self._ending and self.phase == "running" and self._ballot.complete(self.live)

    @property
    def workers(self) -> Assignment:
        """live member -> the worker that it plays, in the order of the members."""
        return {member: self.assignment[member] for member in sorted(self.live)}

    @property
    def unanswered(self) -> set[Member]:
        """Members that have not reported in the current generation."""
        return self.live - self._reports.keys() if self.phase == "reporting" else set()

    def handle(self, event: Event) -> Outcome:
        """Applies one event. Two notes mean that the job cannot continue: "stage_lost" (fields stage and what) if a
        stage has no worker or no copy of a part of its state, and "violation" (field detail) if the numbers would be
        wrong."""
        self._notes, self._expiry = [], None
        try:
            sends = _EVENTS[type(event)](self, event)
        except StageLost as lost:
            sends = []
            self._note_untrusted()
            self._note("stage_lost", stage=lost.stage, what=lost.what, detail=str(lost))
        except ProtocolViolation as violation:
            sends = []
            self._note("violation", detail=str(violation))
        return Outcome(sends + self._new_plan(), self._notes, self._expiry)

    @property
    def wants_plan(self) -> bool:
        """Whether the caller should plan the steps of `problem_now`, and then handle the event `PlanMade`."""
        return self.steady.wanted and self.phase == "running"

    def problem_now(self) -> Problem:
        """The problem without the dead workers. Its graph of links is built once per membership."""
        return self._live_problem.of(self.problem, self.workers.values())

    def in_flight(self, worker: Worker) -> float:
        """The most micro-batches in flight on a worker that died: its limit or, if lower, its peak in the plans at that
        time."""
        problem = self.problem
        if self.phase not in ("starting", "lost", "ended", "finished"):  # only then may a stage lack live workers
            problem = LiveProblem().of(problem, {*self.workers.values(), worker})
        return min(problem.limit(worker), self._peaks.get(worker, math.inf))

    # -- events ------------------------------------------------------------------------------------------------

    def _described(self, event: WorkerDescribed) -> list[Send]:
        self.units.describe(event.member, self.assignment[event.member].stage, event.host, event.units)
        if self.outer is not None and event.outer is not None and self._newest is None:
            self.outer.begin(event.outer)
        return []

    def _ready(self, event: WorkerReady) -> list[Send]:
        if self.phase == "starting":
            self.waiting.discard(event.member)
            self.live.add(event.member)
            return self._regroup() if not self.waiting else []
        self.followers.add(event.member, event.earliest)
        return self._find_donors()

    def _died(self, event: WorkerDied) -> list[Send]:
        """Removes a dead member, and starts a generation without it if it took part. Raises StageLost if its stage has
        no worker left, unless all steps are done and its state is saved. Later deaths do not raise it again."""
        member = event.member
        if self.phase == "starting":
            for of in (self.waiting, self.live, self.leaving):
                of.discard(member)
            self._check_stages(self.live | self.waiting)
            return self._regroup() if not self.waiting else []
        if self.phase == "lost":
            return []
        was_live, lost = member in self.live, self.assignment[member]
        plans = [self.steady.newest, self.remainder_plans.get(self.committed + 1)]
        known = [plan for plan in plans if plan is not None and lost not in plan.problem.dead]
        self._peaks[lost] = max((peak(plan, lost) for plan in known), default=math.inf)
        heir = self.understudies.heir(lost.stage, self.committed) if was_live else None
        self._remove(member)
        self._wrong.pop(member, None)
        if self._cast({} if heir is None else {heir: lost}):
            return self._regroup(rebuild=True)
        self._check_stages(self.live, self.saving.kept if self.phase in ("ended", "finished") else ())
        idle = self.phase == "running" and self.committed == self.steps - 1 and self._validation.step is None
        # If units are sharded and some live member has not finished, it may still need weights from the dead one.
        idle = idle and (self.units.complete or self.live <= self.finished)
        if idle:
            self._finish_if_complete()
        elif was_live and self.phase in ("reporting", "running", "holding"):
            return self._regroup()
        return self._release_hold() + self._find_donors()

    def _received(self, event: MessageReceived) -> list[Send]:
        """Handles a message. Ignores messages of old generations and of dead workers. Raises StageLost if the last
        report of a generation shows that a unit has no copy left. After that, it ignores all messages."""
        if self.phase == "lost" or is_void(event.message, self.generation):
            return []
        return _MESSAGES[type(event.message)](self, event.member, event.message)

    def _evicted(self, event: WorkerEvicted) -> list[Send]:
        if event.member not in self.live and event.member in self.followers:
            self._remove(event.member)
            return [Send(event.member, Leave())]
        self.leaving.add(event.member)
        return []

    def _take_over(self, event: CoordinatorReplaced) -> list[Send]:
        """Continues the job with the live members. Raises StageLost if a stage has none."""
        found = event.found
        self.generation, self.committed, self.live = found.generation, found.committed, set(found.live)
        workers = initial(self.problem.pipelines, self.problem.stages).values()
        self.assignment = completed(found.members, self.assignment, workers)
        self.attempt = found.attempt
        self._base = found.generation if found.base is None else found.base
        self.units.layout = dict(found.layout)
        self.moving.taken_over(found.committed, self.workers)
        self.phase = "running"
        self._new_ballot()
        played = {worker.stage: worker for worker in found.members.values()}
        cast = self._cast({member: played[of.stage] for member, of in found.understudies.items()})
        self.understudies.taken_over(self.workers, found.understudies, self._note)
        self._check_stages(self.live)
        out: list[Send] = []
        self._newest = found.commit
        if found.commit is not None:
            self._validation.begin(found.committed if found.commit.evaluate else None)
            self._speculation.resume(found.commit.stagger)
            self.skipped = found.commit.skipped
            if self.outer is not None and found.commit.outer is not None:
                self.outer.begin(found.commit.outer.state)
            if found.commit.changes:
                self._change_settings(SettingsChanged(found.commit.changes))
            out = [Send(member, found.commit) for member in sorted(found.behind)]
        return out + self._regroup(rebuild=cast or found.base is None)

    def _returned(self, event: WorkerReturned) -> list[Send]:
        """Resends the newest commit if the member lacks it, and rebuilds the links of all members."""
        member = event.member
        if member not in self.live:
            return []
        out: list[Send] = []
        if event.committed < self.committed and self._newest is not None:
            out = [Send(member, self._newest)]
        self.followers.died(member)  # if the member was a donor, its followers restart
        if self.phase not in ("reporting", "running"):
            return out + self._release_hold()
        return out + self._regroup(rebuild=True) + self._find_donors()

    def _restart(self, event: Restarted) -> list[Send]:
        self._note("restarted", committed=self.committed)
        self.moving.end("abandoned", "the job restarts from a checkpoint", self._note)
        assignment, present = refilled(self.assignment, event.present, self.problem.stages), set(event.present)
        fresh = replace(self, first_step=event.step, committed=-1, assignment=assignment, waiting=present)
        fresh.steady, fresh._notes = self.steady, self._notes  # the plans in `steady` remain valid
        vars(self).update(vars(fresh))
        return []

    def _rebuild_links(self, event: LinksBroken) -> list[Send]:
        return self._regroup(rebuild=True) if self.phase in ("reporting", "running") else []

    def _change_problem(self, event: ProblemChanged) -> list[Send]:
        self.problem, self.steady.wanted = event.problem, True
        return []

    def _want_move(self, event: MoveWanted) -> list[Send]:
        """Begins a move, and drops the unfinished one. Ignores the event before the first generation, after the loss of
        a stage, and after the last commit."""
        if self.phase in ("starting", "lost", "ended", "finished") or self.committed == self.steps - 1:
            return []
        self.moving.begin(event, self.workers, self._note)
        outdated = self.moving.announced not in (None, self.moving.move)
        if outdated:
            return self._regroup()
        # Count again, because the move dismisses the understudies for which the commit may have waited.
        return self._release_hold() + self._find_donors() + self._count()

    def _plan_made(self, event: PlanMade) -> list[Send]:
        # A plan made before a (re)start is dropped, because the first generation requests a new one. After the last
        # step no plan is needed, and a stage may have no worker left.
        if self.phase not in ("starting", "lost", "ended", "finished"):
            self.steady.made(self.steady.plan(event.problem), self.problem_now())
        return []

    def _change_saving(self, event: SavingChanged) -> list[Send]:
        self.saving = event
        return []

    def _change_settings(self, event: SettingsChanged) -> list[Send]:
        self.changes = self.changes | event.values  # a new dict, because earlier commits refer to the old one
        self.save_every = event.values.get("checkpoint.every", self.save_every)  # type: ignore[assignment]
        self._note("settings_changed", values=event.values)
        return []

    def _end_early(self, event: EndRequested) -> list[Send]:
        self._ending = True
        return self._count()

    def _hold_expired(self, event: HoldExpired) -> list[Send]:
        if event.generation != self.generation:
            return []
        if self.phase == "running" and event.step == self.committed + 1:
            self.understudies.restart(self.understudies.late(event.step))
            return self._count()
        if self.phase != "holding" or event.step is not None:
            return []
        self.followers.drop_late(self.committed)
        return self._release_hold()

    def _new_plan(self) -> list[Send]:
        """Sends the plan of the next steps, if there is one and the workers wait for it."""
        if not self.steady.ready or self.phase != "running":
            return []
        return [Send(*each) for each in self.steady.send(self.workers, self.generation)]

    # -- generations -------------------------------------------------------------------------------------------

    def _regroup(self, rebuild: bool = False) -> list[Send]:
        """Starts a generation. rebuild: whether to rebuild all links; if False, links between live workers stay up."""
        self.generation += 1
        if rebuild or self._base is None:
            self._base = self.generation
        self.phase = "reporting"
        self._reports.clear()
        self._new_ballot()
        self.understudies.regrouped()
        if self.outer is not None:
            self.outer.regrouped()
        workers = self.workers
        layout = self.moving.layout_next(self.committed, workers)
        self._note("announced", members=[str(worker) for worker in sorted(workers.values())])
        message = Announce(self.generation, workers, self.committed, self._base, self.attempt, layout)
        return [Send(member, message) for member in workers]

    def _reported(self, member: Member, report: Report) -> list[Send]:
        if self.phase != "reporting" or member not in self.live:
            return []
        self._reports[member] = report
        return self._adopt() if len(self._reports) == len(self.live) else []

    def _adopt(self) -> list[Send]:
        """Plans the rest of the step from all reports, and sends each member its orders."""
        if self.moving.announced is not None:
            # The current limits on micro-batches in flight apply, not the limits at the beginning of the move.
            self.problem = self.moving.announced.problem.replace(memory_limit=self.problem.memory_limit)
            self.moving.adopted(self.committed, self.workers, self.assignment, self._note)
        problem, workers = self.problem_now(), self.workers
        try:
            adoption = adopt(
                problem, workers, self._reports, self.committed, self.steps, self.units, self.planner, self.derive
            )
        except StageLost:
            self.phase = "lost"
            raise
        self.remainder_plans = dict(adoption.plans)
        self.phase = "running"
        self.followers.check(self.units.give)
        self.steady.adopted(problem)
        if adoption.ahead:
            self._validation.begin(None)  # the parameters have changed; an incomplete validation is dropped
        left, about = adoption.left, (self.generation, self._validation.step, self._speculation.allowed)
        self._note("plan_adopted", step=self.committed + 1, lost=sorted(left.lost), revoked=sorted(left.revoked))
        # Members with wrong state are killed only now. Until all others had reported, these members might have been the
        # only ones that could tell a new coordinator that the step is void.
        self._note_untrusted()
        outer = None if self.outer is None else self.outer.state
        out = [Send(member, adoption.message(worker, *about, outer)) for member, worker in workers.items()]
        return out + self._find_donors()

    # -- commits -----------------------------------------------------------------------------------------------

    def _voted(self, member: Member, vote: Vote) -> list[Send]:
        if self.phase != "running" or member not in self.live or vote.step != self.committed + 1:
            return []
        self._ballot.cast(member, self.assignment[member], vote)
        return self._count()

    def _prepared(self, member: Member, message: Prepared) -> list[Send]:
        """Records that an understudy can complete the commit of a step."""
        if self.understudies.prepared(member, message.session, message.step, self.committed):
            worker = self.followers.understudies[member].worker
            self._note("understudy_in_step", member=member, worker=worker, role=self.assignment[member])
        return self._count()

    def _refused(self, member: Member, message: NoRoom) -> list[Send]:
        """Removes an understudy that has no memory for the copy, and looks for another one."""
        worker = self.understudies.refused(member, message.session)
        if worker is not None:
            about = {"needed": message.needed, "free": message.free}
            self._note("understudy_refused", member=member, worker=worker, role=self.assignment[member], **about)
        return self._find_donors()

    def _count(self) -> list[Send]:
        """If all members have voted and the understudies are prepared: commits the step, repeats it, or removes members
        with wrong state."""
        if self.phase != "running" or not self._ballot.complete(self.live):
            return []
        if self.understudies.late(self.committed + 1):
            self._expiry = HoldExpired(self.generation, self.committed + 1)
            return []
        if wrong := self.units.compare(self.workers, self._ballot.votes, self.committed + 1):
            return self._evict_wrong(wrong)
        if self._ballot.misfits:
            return self._repeat(self._ballot.misfits)
        return [] if self.waits_for_round else self._commit()

    def _note_untrusted(self) -> None:
        """Asks the caller to kill the members that were removed because of wrong state."""
        for member, detail in self._wrong.items():
            self._note("untrusted", member=member, worker=self.assignment[member], detail=detail)
        self._wrong.clear()

    def _evict_wrong(self, wrong: dict[Member, str]) -> list[Send]:
        """Removes members with wrong state and repeats the whole step with the weights of the others. The step is void
        because wrong weights were sent to peers, and all workers may have used them. Once all others have reported in
        the new generation, an `untrusted` note asks the caller to kill each removed member. Raises StageLost if a
        stage has no worker left."""
        self.attempt = self.attempt._replace(repaired=self.attempt.repaired + 1)
        for member, detail in wrong.items():
            worker, host = self.assignment[member], self.units.hosts.get(member)
            self._note("mismatch", member=member, worker=worker, host=host, detail=detail)
            self._remove(member)  # its followers restart with other donors, because they may have wrong state
        self._wrong |= wrong
        self._check_stages(self.live)
        return self._regroup()

    def _repeat(self, stages: list[int]) -> list[Send]:
        """Repeats the step with the same samples and coarser sums, which can represent larger values. After a few
        attempts any float32 fits."""
        self.attempt = self.attempt._replace(coarser=self.attempt.coarser + 1)
        self._note("repeated", step=self.committed + 1, stages=stages, attempt=self.attempt.coarser)
        return self._regroup()

    def _commit(self) -> list[Send]:
        decision = self._ballot.decide()
        self.committed, self.attempt = decision.step, FIRST
        self._new_ballot()
        voters, last = sorted(self.live), decision.step == self.steps - 1
        early = self._ending and not last
        self.skipped = self.skipped + 1 if decision.scale is None else 0
        due = self.saving.due or self._due(self.save_every, decision.step)
        save = last or early or (due and not self.skipped)  # a skipped update is a sign that the weights may be bad
        skipped = save and self.saving.occupied and not (last or early)
        saves = save and not skipped
        gone = set() if last or early else self._leave_now()
        fresh, ahead = self.steady.fresh, self._speculation.allowed  # ahead: workers may have begun the next step
        took_back = self._speculation.decided(decision.scale)
        joining, switch = self.followers.about_to_join(self.committed), False
        if last or early:
            self.moving.end("abandoned", "the job ends", self._note)
        elif self.moving.about_to_switch(self.committed, self.workers):
            self._speculation.pause()
            switch = not ahead
        # If workers may already run the next step with the old plan, only a new generation can change the plan.
        hold = not last and (early or took_back or bool(gone) or joining or switch or (fresh and ahead))
        evaluate = self._due(self.evaluate_every, decision.step) and not early
        self.steady.due = self.steady.due or fresh
        message = Commit(
            generation=self.generation,
            step=decision.step,
            scale=decision.scale,
            norm=decision.norm,
            loss=decision.loss,
            hold=hold,
            replan=self.steady.due,
            void=took_back,
            evaluate=evaluate,
            savers=self.units.savers(self.workers) if saves else [],
            in_use=self.saving.in_use if saves else None,
            last=last or early,
            skipped=self.skipped,
            stagger=self._speculation.allowed,
            changes=self.changes,
            outer=None if self.outer is None else self.outer.commit(self.live, decision.step, last or early),
        )
        self._newest = message
        self._validation.begin(decision.step if evaluate else None)
        self._note("committed", commit=message, skipped=skipped)
        out = [Send(member, message) for member in voters]
        if early:
            self.phase = "ended"
            return out
        out += [Send(member, Leave()) for member in sorted(gone)]
        if hold and (joining or switch):
            self.phase, self._expiry, self.moving.due = "holding", HoldExpired(self.generation), switch
        elif hold:
            out += self._regroup()
        return out + self._find_donors()

    def _leave_now(self) -> set[Member]:
        """Removes the leaving members that can leave now."""
        gone = self.units.leavers(self.leaving, self.workers)
        for member in sorted(gone):
            self._remove(member)
            self._note("left", worker=str(self.assignment[member]), step=self.committed + 1)
        return gone

    def _due(self, every: int, step: int) -> bool:
        return every > 0 and ((step + 1) % every == 0 or step == self.steps - 1)

    def _evaluated(self, member: Member, message: Evaluated) -> list[Send]:
        if member in self.live and (found := self._validation.counted(message)) is not None:
            self._note("evaluated", step=message.step, val_loss=found.loss, microbatches=found.microbatches)
            self._finish_if_complete()
        return []

    def _round_ready(self, member: Member, message: RoundReady) -> list[Send]:
        """Records that a worker of an island has computed theta."""
        if self.outer is None or member not in self.live:
            return []
        self.outer.ready(member, message.applied, message.mine)
        self._note("round_computed", statistics=message.statistics)
        behind = self.outer.behind(self.live, member)
        return [*(Send(of, RoundGoal(self.generation, goal)) for of, goal in behind.items()), *self._count()]

    def _cut_missing(self, member: Member, message: CutMissing) -> list[Send]:
        """Records that a worker of an island lacks units of the cut delta."""
        if self.outer is None or member not in self.live:
            return []
        self.outer.lacks(member, message.sent, message.units)
        return self._count()

    def _has_finished(self, member: Member, message: Finished) -> list[Send]:
        """Records that the parameters of this member are final."""
        if member in self.live:
            self.finished.add(member)
            self._finish_if_complete()
        return []

    def _finish_if_complete(self) -> None:
        if self.live <= self.finished and self._validation.step is None:
            self.phase = "finished"

    # -- followers ---------------------------------------------------------------------------------------------

    def _find_donors(self) -> list[Send]:
        """Chooses understudies, and orders donors to send units to followers. Does nothing until the current generation
        is adopted. After a move, the orders also wait for the next commit (`Moving.settling`)."""
        if self.phase != "running":
            return []
        calm = self.moving.move is None
        self.understudies.choose(self.workers, self.units, self.leaving, self.problem_now, calm, self._note)
        if self.moving.settling(self.committed):
            return []
        out = self.understudies.orders(self.generation, self.workers)
        return out + self.moving.find_donors(self.committed, self.generation, self.workers, self.assignment)

    def _synced(self, member: Member, message: Synced) -> list[Send]:
        """Records that a follower has its units in the state after a step."""
        return self._release_hold() if self.followers.synced(member, message.step, message.session) else []

    def _stream_lost(self, member: Member, message: StreamLost) -> list[Send]:
        """Restarts a follower. It gets donors at the next commit, so a network that stays broken causes little work."""
        lost = self.followers.stream_lost(message.session, self.committed)
        return self._release_hold() + self._count() if lost else []

    def _release_hold(self) -> list[Send]:
        """If all workers wait for followers and none is late, starts a generation. Ready joiners become its members."""
        late = self.followers.about_to_join(self.committed) or self.moving.late(self.committed, self.workers)
        if self.phase != "holding" or late:
            return []
        ready = self.followers.take_ready(self.committed)
        for back in ready:
            self.live.add(back)
            self._note("rejoined", worker=str(self.assignment[back]), step=self.committed + 1)
        return self._regroup(rebuild=bool(ready))

    # -- helpers -----------------------------------------------------------------------------------------------

    def _remove(self, member: Member) -> None:
        """Removes a member or a joiner. Its followers restart with other donors."""
        self.units.died(member)
        self.followers.died(member)
        for of in (self.live, self.leaving, self.finished):
            of.discard(member)

    def _cast(self, heirs: Mapping[Member, Worker]) -> bool:
        """Lets understudies take over these workers, if their stages have no live worker left. Returns whether the
        assignment has changed.

        heirs: understudy -> the worker that it takes over

        An understudy stays in its own stage if it is the last worker or the last holder of a unit there. After the
        last commit every understudy stays, because its own stage may still have to save a part of a checkpoint.
        """
        before = self.assignment
        for heir, worker in sorted(heirs.items()):
            lost = worker.stage not in {of.stage for of in self.workers.values()}
            training = self.phase in ("reporting", "running", "holding") and self.committed < self.steps - 1
            if training and lost and self.units.leavers({heir}, self.workers):
                self._note("took_over", member=heir, worker=worker, role=self.assignment[heir])
                self.assignment = exchanged(self.assignment, heir, worker)
                self.followers.died(heir)
        return self.assignment is not before

    def _check_stages(self, live: Collection[Member], kept: Collection[int] = ()) -> None:
        """Raises StageLost if a stage has no live member. kept: stages that need none, while any member is live."""
        stages = {self.assignment[member].stage for member in live}.union(kept if live else ())
        for stage in range(self.problem.stages):
            if stage not in stages:
                self.phase = "lost"  # later messages are ignored
                raise StageLost(stage)

    def _new_ballot(self) -> None:
        self._ballot = Ballot(self.committed + 1, self.problem.stages, self.problem.total, self.clip)

    def _note(self, name: str, **fields: Any) -> None:
        self._notes.append({"event": name, "generation": self.generation, **fields})


_EVENTS: dict[type[Event], Callable[[Job, Any], list[Send]]] = {
    WorkerDescribed: Job._described,
    WorkerReady: Job._ready,
    WorkerDied: Job._died,
    MessageReceived: Job._received,
    WorkerEvicted: Job._evicted,
    WorkerReturned: Job._returned,
    CoordinatorReplaced: Job._take_over,
    Restarted: Job._restart,
    LinksBroken: Job._rebuild_links,
    ProblemChanged: Job._change_problem,
    MoveWanted: Job._want_move,
    PlanMade: Job._plan_made,
    SavingChanged: Job._change_saving,
    SettingsChanged: Job._change_settings,
    EndRequested: Job._end_early,
    HoldExpired: Job._hold_expired,
}
_MESSAGES: dict[type[Message], Callable[[Job, Member, Any], list[Send]]] = {
    Report: Job._reported,
    Vote: Job._voted,
    Evaluated: Job._evaluated,
    Finished: Job._has_finished,
    Synced: Job._synced,
    StreamLost: Job._stream_lost,
    Prepared: Job._prepared,
    NoRoom: Job._refused,
    RoundReady: Job._round_ready,
    CutMissing: Job._cut_missing,
}
