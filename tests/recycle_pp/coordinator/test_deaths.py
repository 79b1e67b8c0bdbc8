"""The consequences of a death; each death is recorded once."""

import asyncio
from types import SimpleNamespace

import pytest

from recycle_pp.config.settings import Parallel, Run, Settings
from recycle_pp.coordinator.context import Context
from recycle_pp.coordinator.deaths import Deaths
from recycle_pp.coordinator.job import new_job
from recycle_pp.coordinator.lifecycle import Lifecycle
from recycle_pp.coordinator.restart_policy import RestartPolicy
from recycle_pp.coordinator.roster import Roster
from recycle_pp.coordinator.timers import Timers
from recycle_pp.fitting.problem import initial_problem
from recycle_pp.protocol.events import ProblemChanged, WorkerDied, WorkerReady
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.wire.messages.supervisors import Death, Died, Dying, Spawn

from .held_lease import HeldLease

SEGFAULT = Death("signal", "SIGSEGV")


class Supervisor:
    def __init__(self):
        self.received = []

    def send(self, message):
        self.received.append(type(message))


class Recorder:
    """Keeps the events in memory."""

    def __init__(self):
        self.causes, self.events = [], []

    def death(self, worker, process, now, stood=None):
        pass

    def found_dead(self, worker, process, now):
        self.events.append("found_dead")

    def suppose_death(self, process, death):
        pass

    def release(self):
        pass

    def explain_death(self, process, death):
        self.causes.append(death.cause)

    def given_up(self, worker, process, respawns):
        self.events.append("given_up")

    def event(self, event):
        self.events.append(event.name())

    def stopped(self, *reason):
        self.events.append("stopped")


class Driver:
    """A driver whose job always continues."""

    job = SimpleNamespace(committed=3, live=set())

    def __init__(self):
        self.subscribers = []

    def drive(self, event):
        pass

    def died(self, worker):
        pass

    def send(self, out):
        pass


@pytest.fixture
def of():
    """One running worker and the `Deaths` under test."""

    class Of:
        settings = Settings(run=Run(respawns=1))
        recorder, supervisor = Recorder(), Supervisor()
        roster, restarts, timers = Roster(settings), RestartPolicy(settings), Timers(pytest.fail, HeldLease())
        lifecycle = Lifecycle(recorder, lambda: None)
        rank = roster.enter(0)
        rank.supervisor, rank.incarnation, rank.alive = supervisor, 0, True
        context = Context(settings, RunFolder("nowhere"), roster, restarts, timers, recorder, lifecycle, HeldLease())
        deaths = Deaths(context, Driver())

    return Of


async def _dies(of, cause):
    of.deaths.reported(of.rank, Died(0, cause, asked=False))


def test_a_worker_that_dies_by_itself_is_restarted(of):
    asyncio.run(_dies(of, SEGFAULT))
    assert of.recorder.causes == ["signal"]
    assert of.recorder.events == ["respawned"] and of.supervisor.received == [Spawn]


def test_a_worker_that_dies_too_often_is_given_up(of):
    of.rank.respawns = 1
    asyncio.run(_dies(of, SEGFAULT))
    assert of.recorder.events == ["given_up"] and of.supervisor.received == []


def test_a_worker_killed_on_request_is_not_restarted(of):
    asyncio.run(_dies(of, Death("signal", "SIGSEGV", injected=True)))
    assert of.recorder.causes == ["signal"] and of.recorder.events == of.supervisor.received == []


def test_a_death_reported_twice_is_recorded_once(of):
    async def seen_twice():
        of.deaths.disconnected(of.rank, 0)
        of.deaths.dying(of.rank, Dying(0, at=1.0))
        await _dies(of, SEGFAULT)  # then its supervisor reports the cause
        await _dies(of, SEGFAULT)
        of.deaths.close()

    asyncio.run(seen_twice())
    assert of.recorder.causes == ["signal"] and of.supervisor.received == [Spawn]


def test_a_worker_that_a_successor_finds_dead_is_restarted(of):
    async def finds():
        of.rank.alive, of.rank.causes[0] = False, SEGFAULT
        of.deaths.found(of.rank, begun=True)

    asyncio.run(finds())
    assert of.recorder.causes == ["signal"] and of.recorder.events == ["found_dead", "respawned"]


def test_a_death_at_the_end_of_the_job_is_recorded(of):
    async def ends():
        of.deaths.disconnected(of.rank, 0)
        of.deaths.close()
        of.deaths.close()

    asyncio.run(ends())
    assert of.recorder.causes == ["unknown"] and of.supervisor.received == []


class Drives(Driver):
    """A driver of a real job, whose newest checkpoint has five steps."""

    def __init__(self, job):
        super().__init__()
        self.job = job
        self.saving = SimpleNamespace(restore_point=lambda step, started, present, stages: 5, abandon=lambda: None)
        self.ending = SimpleNamespace(signal=None)

    def drive(self, event):
        for note in self.job.handle(event).notes:
            for follow in self.subscribers:
                follow(note)

    def report_damage(self, damaged):
        pass


def test_after_the_last_death_of_a_stage_the_others_restart_from_the_checkpoint_as_other_workers():
    settings = Settings(parallel=Parallel(pipelines=2, stages=2))
    job = new_job(settings, 0)
    recorder, roster, driver = Recorder(), Roster(settings), Drives(job)
    lifecycle = Lifecycle(recorder, lambda: None)
    timers = Timers(pytest.fail, HeldLease())
    context = Context(
        settings, RunFolder("nowhere"), roster, RestartPolicy(settings), timers, recorder, lifecycle, HeldLease()
    )
    ranks = [roster.enter(number) for number in range(4)]
    for rank in ranks:
        rank.incarnation, rank.alive = 0, rank.number != 1
        driver.drive(WorkerReady(rank.role))
    for rank in (ranks[0], ranks[2]):
        rank.supervisor = Supervisor()
    driver.drive(WorkerDied(ranks[1].role))
    generation = job.generation

    async def dies():
        Deaths(context, driver).disconnected(ranks[3], 0)
        while job.phase != "starting":  # the checkpoints are read in a thread
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(dies(), 20))
    assert {ranks[0].role.stage, ranks[2].role.stage} == {0, 1}
    assert ranks[0].supervisor.received == ranks[2].supervisor.received == [Spawn]
    assert job.first_step == 5 and job.committed == 4 and job.generation == generation
    assert job.waiting == {ranks[0].role, ranks[2].role}
    assert recorder.events == ["stage_lost"] and not lifecycle.over


class Replans(Driver):
    """A driver whose job accepts any problem."""

    def __init__(self, settings):
        super().__init__()
        self.job = SimpleNamespace(committed=3, live=set(), first_step=0, problem=initial_problem(settings))

    def drive(self, event):
        if isinstance(event, ProblemChanged):
            self.job.problem = event.problem


@pytest.mark.parametrize(("cause", "deaths"), [("exception", 2), ("out_of_memory", 6)])
def test_an_op_that_runs_out_of_memory_on_two_workers_is_retried_with_fewer_micro_batches_in_flight(cause, deaths):
    settings = Settings(parallel=Parallel(pipelines=2, stages=1), run=Run(respawns=9))
    recorder, roster, driver = Recorder(), Roster(settings), Replans(settings)
    lifecycle = Lifecycle(recorder, lambda: None)
    timers = Timers(pytest.fail, HeldLease())
    context = Context(
        settings, RunFolder("nowhere"), roster, RestartPolicy(settings), timers, recorder, lifecycle, HeldLease()
    )
    ranks = [roster.enter(number) for number in range(2)]
    limit = driver.job.problem.limit(ranks[0].role)
    assert limit == 3  # 1F1B's one and memory_extra's two

    async def die():
        said = Death(cause, "no more", where="F of micro-batch 0.1 in step 4")
        of = Deaths(context, driver)
        for number in range(20):
            if lifecycle.over:
                return number
            rank = ranks[number % 2]
            rank.supervisor, rank.incarnation, rank.alive = Supervisor(), number, True
            of.reported(rank, Died(number, said, asked=False))

    assert asyncio.run(die()) == deaths
    if cause == "out_of_memory":
        assert [driver.job.problem.limit(rank.role) for rank in ranks] == [1, 1]
