"""Moves decoder layers between stages while the job trains (`schedule.rebalance`), and records the moves.

    rebalancing = Rebalancing(state, driver, planning)      # a handler of the job's events
    rebalancing.resumed(rank, message)                      # a worker runs again in a new generation

After each commit, the handler compares the current layout with the best layout for the live workers. A thread searches
for the best layout (`fitting/layout_search.py`), and does so again when the membership, the measured times or the
layout have changed. If a move pays (`fitting/move_policy.py`), the handler passes the event `MoveWanted` to the job,
which moves the layers (`protocol/moving.py`).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from recycle_schedules import OpKind, Problem, Worker
from recycle_schedules.layers import Layout

from recycle_pp.fitting.layout_search import Found, search
from recycle_pp.fitting.move_policy import BANDWIDTH, SWITCH, Move
from recycle_pp.fitting.problem import relaid_problem
from recycle_pp.protocol.events import Event, Json, MoveWanted, Outcome
from recycle_pp.protocol.live_problem import all_workers
from recycle_pp.telemetry.events.layers import Rebalanced, RebalancingAbandoned
from recycle_pp.telemetry.events.layers import Rebalancing as Begun
from recycle_pp.wire.messages.generations import Resumed
from recycle_pp.wire.messages.lifecycle import Donate
from recycle_pp.wire.messages.members import Member
from recycle_pp.wire.messages.steps import Commit

from .driver import Driver
from .planning import Planning
from .ranks import Rank
from .state import JobState

REPLACED = "another layout suits the live workers better now"
SWITCHED_OFF = "schedule.rebalance is never now"


class Case(NamedTuple):
    """The input of a search for the best layout."""

    live: frozenset[Worker]
    problem: Problem
    layout: Layout


@dataclass
class Open:
    """A move that has begun. All times are values of time.monotonic().

    event       the event that recorded the beginning of the move
    began       time of this event
    held        time of the commit before the switch to the new layout
    switched    time of the switch
    generation  generation of the switch
    updates     (P,) seconds that an optimizer step of each stage took before the switch
    resumed     member -> time when it ran its next op, or was ready for its next input
    """

    event: Begun
    began: float
    held: float = 0.0
    switched: float = 0.0
    generation: int = -1
    updates: tuple[float, ...] = ()
    resumed: dict[Member, float] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        return tuple(self.event.layout)


class Rebalancing:
    def __init__(self, state: JobState, driver: Driver, planning: Planning) -> None:
        self._state, self._driver, self._planning = state, driver, planning
        split = state.settings.model.split
        self._keep = tuple(split) if isinstance(split, list) else None
        self._joining: set[Member] = set()  # joiners that receive state
        self._searching: asyncio.Task[None] | None = None
        self._case: Case | None = None  # input of the last search
        self._found: Found | None = None  # result of the last search; None: no better layout
        self._wanted: tuple[Found, Move] | None = None  # the move that was begun last
        self._open: Open | None = None
        self._switched: Open | None = None  # the last move, until the first step in its layout is committed
        self._stalls: list[float] = []  # stall of each switch, in seconds
        self._held = 0.0  # time of the newest commit

    def handled(self, event: Event, outcome: Outcome) -> None:
        job = self._state.job
        donations = {send.message.to for send in outcome.sends if isinstance(send.message, Donate)} - job.live
        self._joining = {member for member in self._joining | donations if member in job.followers} - job.live
        for note in outcome.notes:
            match note["event"]:
                case "plan_adopted":
                    self._adopted()
                case "move_begun":
                    self._begun(note)
                case "move_ended":
                    self._ended(note)
                case "committed":
                    self._committed(note["commit"])
                case "restarted":
                    self._restarted()

    def resumed(self, rank: Rank, message: Resumed) -> None:
        move = self._switched
        if move is not None and message.generation == move.generation:
            # Workers of later stages wait for their first input in every step, so this wait does not count.
            phase = "resumed" if rank.role.stage == 0 else "relaid"
            at = message.times.get(phase, message.times["followed"])
            move.resumed[rank.number] = self._state.spans.local(rank.role, at)

    # -- the decision ------------------------------------------------------------------------------------------

    def _committed(self, commit: Commit) -> None:
        state, job = self._state, self._state.job
        self._held = time.monotonic()
        dead = all_workers(job.problem) - set(job.workers.values())
        if state.profile.outages.observe(dead, self._held) and state.profile.complete:
            state.run.later(state.run.write_json, state.run.profile, state.profile.to_json())
        if self._switched is not None:
            self._record(self._switched, commit.step)
            self._switched = None
        if self._open and self._off:
            self._driver.drive(MoveWanted(job.units.layout, job.problem))
        elif not commit.last and self._may_move():
            self._compare()

    @property
    def _off(self) -> bool:
        """Whether no layers may move. A user may change this while a move is open."""
        return self._state.settings.schedule.rebalance == "never"

    def _may_move(self) -> bool:
        state, job, layout = self._state, self._state.job, self._state.profile.layout
        schedule = state.settings.schedule
        measured = state.profile.complete or not schedule.profile_steps
        calm = job.phase == "running" and not self._joining and state.ending.signal is None
        movable = not self._off and state.layers.stays is None and 1 < len(layout) < sum(layout)
        return movable and measured and calm and not state.lifecycle.over

    def _compare(self) -> None:
        """Decides on a move if the best layout is known; otherwise starts a search for it."""
        case = self._now()
        if case == self._case:
            self._decide(case)
        elif self._searching is None:
            work = self._state.lifecycle.guard(self._search, case, part="the planner")
            self._searching = asyncio.create_task(work)

    def _now(self) -> Case:
        job = self._state.job
        return Case(frozenset(job.workers.values()), job.problem, self._state.profile.layout)

    async def _search(self, case: Case) -> None:
        found = await asyncio.to_thread(search, case.problem, case.live, self._state.layers, case.layout, self._keep)
        await self._state.lease.wait()
        self._searching, self._case, self._found = None, case, found
        if self._may_move() and self._now() == case:
            self._decide(case)

    def _decide(self, case: Case) -> None:
        """Begins a move to the best layout if that pays. Otherwise abandons an unfinished move to another layout."""
        found, job = self._found, self._state.job
        goal = self._open.layout if self._open else case.layout
        if goal == (found.layout if found else case.layout):
            return
        move = self._move_to(found, case) if found else None
        if found and move and move.pays(self._state.settings.schedule.rebalance):
            self._wanted = found, move
            self._planning.prepare(found.live)
            layout = self._state.layers.relaid(job.units.layout, found.layout)
            self._driver.drive(MoveWanted(layout, found.whole))
        elif self._open:
            self._driver.drive(MoveWanted(job.units.layout, case.problem))

    def _move_to(self, found: Found, case: Case) -> Move:
        state, job, now = self._state, self._state.job, time.monotonic()
        soon = {rank.role for rank in state.roster if rank.number not in job.live and self._will_return(rank)}
        rest = (state.settings.run.steps - 1 - job.committed) * found.now
        return Move(
            now=found.now,
            then=found.then,
            outage=min(rest, state.profile.outages.expected(now, soon)),
            seconds=found.most / (state.profile.links.slowest or BANDWIDTH) + found.now,
            back=case.live != all_workers(case.problem),
            switch=median(self._stalls) if self._stalls else SWITCH,
        )

    def _will_return(self, rank: Rank) -> bool:
        """Whether this dead worker may return soon: its new process is starting, the cause of its death is not known
        yet, or a rejoin is due."""
        return rank.alive or rank.explained < rank.died or self._state.restarts.is_due(rank.role)

    # -- the records -------------------------------------------------------------------------------------------

    def _adopted(self) -> None:
        layout = self._state.layers.counts(self._state.job.units.layout)
        self._state.profile.relayout(layout)
        self._state.recorder.relaid(layout)

    def _restarted(self) -> None:
        """Returns to the initial layout. All workers restart with it."""
        self._open = self._switched = None
        layers, profile, job = self._state.layers, self._state.profile, self._state.job
        if (moved := profile.layout) and moved != (first := layers.start):
            profile.relayout(first)
            problem = relaid_problem(job.problem, layers.settings(first), moved, first)
            self._driver.change(profile.problem(problem))

    def _begun(self, note: Json) -> None:
        assert self._wanted is not None
        found, move = self._wanted
        event = Begun(
            before=list(self._state.profile.layout),
            layout=list(found.layout),
            step_seconds=move.now,
            new_step_seconds=move.then,
            outage_seconds=move.outage,
            gain_seconds=move.gain,
            cost_seconds=move.cost,
            bytes=found.bytes,
            receivers=[str(self._state.job.assignment[member]) for member in sorted(note["receivers"])],
        )
        profile, stages = self._state.profile, self._state.settings.parallel.stages
        updates = tuple(profile.seconds(Worker(0, s), OpKind.OPTIMIZER) or 0.0 for s in range(stages))
        self._open = Open(event, time.monotonic(), updates=updates)
        self._state.recorder.layers_moved(event)

    def _ended(self, note: Json) -> None:
        move, self._open = self._open, None
        if note["how"] == "switched" and move is not None:
            move.held, move.switched, move.generation = self._held, time.monotonic(), self._state.job.generation
            self._switched = move
            self._adopted()
        else:
            layout = list(self._state.profile.layout)
            detail = note["detail"] or (SWITCHED_OFF if self._off else REPLACED)
            self._state.recorder.layers_moved(RebalancingAbandoned(layout=layout, detail=detail))

    def _record(self, move: Open, step: int) -> None:
        """Records a finished move. step: the first step in the new layout, which has just been committed."""
        state, event = self._state, move.event
        stages = {member: worker.stage for member, worker in state.job.workers.items()}
        # In every step, a worker waits for its own optimizer step or that of the first stage. This is not a stall.
        stalls = [
            at - move.held - max(move.updates[0], move.updates[stages[member]])
            for member, at in move.resumed.items()
            if member in stages
        ]
        stall = max(stalls, default=0.0)
        if stalls:  # a death in the switch may have prevented all measurements
            self._stalls.append(max(0.0, stall))
        state.recorder.layers_moved(
            Rebalanced(
                before=event.before,
                layout=event.layout,
                first_step=step,
                step_seconds=event.step_seconds,
                new_step_seconds=event.new_step_seconds,
                gain_seconds=event.gain_seconds,
                cost_seconds=event.cost_seconds,
                bytes=event.bytes,
                seconds=move.switched - move.began,
                stall_seconds=max(0.0, stall),
            )
        )
