"""Plans are made in the background."""

import asyncio
import json
import threading
import time

import pytest
from recycle_schedules import Problem, Worker, actions, plan

from recycle_pp.config.settings import Parallel, Settings
from recycle_pp.coordinator.planning import Planning, load
from recycle_pp.fitting.profile import Profile
from recycle_pp.protocol.events import MessageReceived, WorkerDied, WorkerReady
from recycle_pp.protocol.job import Job
from recycle_pp.protocol.steady_state_plan import Steady
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.wire.messages.generations import Holds, Report, SteadyPlan

from .states import job_state


def job(planner):
    """A job with all its workers. Its first generation waits for a plan."""
    made = Job(Problem(pipelines=2, stages=2, microbatches=2), steps=9, planner=planner, derive=actions)
    for member in made.assignment:
        made.handle(WorkerReady(member))
    everybody_reports(made)
    return made


def everybody_reports(made):
    for member in sorted(made.live):
        report = Report(made.generation, records=[], ahead=False, busy=0.0, holds=Holds([], None, -1))
        made.handle(MessageReceived(member, report))


class Coordinator:
    """The part of a coordinator that planning uses, including the driver."""

    def __init__(self, made):
        self.state, self.job, self.sent = job_state(job=made), made, []
        self.planning = Planning(self.state, self)

    def drive(self, event):
        outcome = self.job.handle(event)
        self.sent += outcome.sends
        self.planning.handled(event, outcome)

    def look(self):
        self.planning.handled(event=None, outcome=None)


class Held:
    """A planner that blocks until it is released."""

    def __init__(self):
        self.asked, self.go_on, self._begun = [], threading.Event(), threading.Event()

    def __call__(self, problem):
        self.asked.append(problem)
        self._begun.set()
        self.go_on.wait(5)
        return plan(problem)

    async def begun(self):
        """Returns a coordinator once this planner has started to plan for it."""
        coordinator = Coordinator(job(self))
        coordinator.look()
        await asyncio.to_thread(self._begun.wait, 5)
        return coordinator


def test_messages_are_handled_while_a_plan_is_made():
    beats = []

    def slow(problem):
        time.sleep(0.3)
        return plan(problem)

    async def run():
        coordinator = Coordinator(job(slow))
        coordinator.look()
        while not coordinator.sent:
            beats.append(time.monotonic())
            await asyncio.sleep(0.01)
        return coordinator

    coordinator = asyncio.run(run())
    assert len(beats) > 3
    assert [type(message) for _, message in coordinator.sent] == [SteadyPlan] * 4
    assert not coordinator.job.wants_plan


def test_a_plan_for_an_old_membership_is_dropped_and_another_one_is_made():
    planner = Held()

    async def run():
        coordinator = await planner.begun()
        coordinator.job.handle(WorkerDied(min(coordinator.job.live)))
        everybody_reports(coordinator.job)
        planner.go_on.set()
        while not coordinator.sent:
            await asyncio.sleep(0.01)
        return coordinator

    coordinator = asyncio.run(run())
    assert [len(problem.dead) for problem in planner.asked] == [0, 1]
    assert {to for to, _ in coordinator.sent} == coordinator.job.live


def test_a_stage_lost_during_planning_is_not_reported_as_a_planner_error():
    planner = Held()

    async def run():
        coordinator = await planner.begun()
        coordinator.job.handle(WorkerDied(1))
        assert [note["event"] for note in coordinator.job.handle(WorkerDied(3)).notes] == ["stage_lost"]
        planner.go_on.set()
        while coordinator.planning.busy:
            await asyncio.sleep(0.01)
        return coordinator

    coordinator = asyncio.run(run())
    assert coordinator.sent == [] and not coordinator.state.lifecycle.over


def test_a_planner_that_fails_ends_the_job_with_its_traceback():
    def fails(problem):
        raise ZeroDivisionError("no time at all")

    async def run():
        coordinator = Coordinator(job(fails))
        coordinator.look()
        while not coordinator.state.lifecycle.over:
            await asyncio.sleep(0.01)
        return coordinator

    reason = asyncio.run(run()).state.lifecycle.reason
    assert reason.startswith("the planner failed") and "ZeroDivisionError: no time at all" in reason


def test_the_plan_after_a_death_is_made_in_advance():
    """During each step, the planner prepares for one possible death."""
    asked = []

    def planner(problem):
        asked.append(problem)
        return plan(problem)

    async def run():
        coordinator = Coordinator(job(planner))
        coordinator.look()
        while not coordinator.sent:
            await asyncio.sleep(0.01)
        for step in range(4):
            coordinator.job.committed = step
            coordinator.look()
            while coordinator.planning.busy:
                await asyncio.sleep(0.01)
        known = [p for p in asked if p.dead]
        coordinator.job.committed = -1
        coordinator.job.handle(WorkerDied(2))
        everybody_reports(coordinator.job)
        made, after = len(asked), coordinator.job.problem_now()
        assert coordinator.job.steady.plan(after).plan.problem == after
        return known, asked[made:]

    known, later = asyncio.run(run())
    assert [len(problem.dead) for problem in known] == [1, 1], "one plan serves the deaths of all equal pipelines"
    assert later == []


def test_the_event_loop_does_not_look_for_deaths_without_a_plan(monkeypatch):
    threads = []

    def ahead(steady):
        threads.append(threading.current_thread())
        yield from ()

    async def run():
        coordinator = Coordinator(job(plan))
        coordinator.job.committed = 0
        coordinator.look()
        while not threads:
            await asyncio.sleep(0.01)

    monkeypatch.setattr(Steady, "ahead", ahead)
    asyncio.run(run())
    assert threading.main_thread() not in threads


def test_the_plan_of_an_expected_problem_is_made_before_those_of_possible_deaths():
    asked = []

    def planner(problem):
        asked.append(problem)
        return plan(problem)

    async def run():
        coordinator = Coordinator(job(planner))
        expected = coordinator.job.problem.replace(durations={"F": [1, 2]})
        coordinator.job.committed = 0
        coordinator.look()
        coordinator.planning.prepare(expected)
        while len(asked) < 3:
            await asyncio.sleep(0.01)
        assert asked[1] == expected and asked[2].dead
        coordinator.job.steady.plan(expected)
        return len(asked)

    assert asyncio.run(run()) == 3, "the plan of the expected problem is kept"


@pytest.mark.parametrize("damage", [None, "", "{", '{"steps": 3}', '{"durations_seconds": 7}'])
def test_a_new_coordinator_plans_with_the_profile_of_the_lost_one_and_measures_again_if_it_is_damaged(tmp_path, damage):
    run, settings = RunFolder(tmp_path), Settings(parallel=Parallel(pipelines=1, stages=1))
    durations = {kind: [0.25] for kind in "FIWBO"}
    seconds = {"turn_seconds": 0.0, "message_seconds": 0.0, "sum_seconds": [0.0]}
    profile = {"durations_seconds": durations, "steps": 3, "boundary_bytes": [], **seconds}
    run.profile.write_text(json.dumps(profile) if damage is None else damage)
    measured = Profile(settings)
    asyncio.run(load(measured, run.profile))
    known = None if damage is not None else 0.25
    assert measured.seconds(Worker(0, 0), "F") == known
    problem = Problem(pipelines=1, stages=1, microbatches=1)
    assert (measured.problem(problem).durations == durations) == (damage is None)
