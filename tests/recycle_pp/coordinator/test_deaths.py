"""A death is recorded once, and its worker is restarted, replaced or given up."""

import asyncio
import errno
from types import SimpleNamespace

import pytest
from recycle_schedules import Worker

from recycle_pp.config.settings import Checkpoint, Parallel, Run, Settings
from recycle_pp.coordinator.after_commit import AfterCommit
from recycle_pp.coordinator.checkpoints import Whole
from recycle_pp.coordinator.deaths import CAUSE_SECONDS, Deaths
from recycle_pp.coordinator.driver import Driver as RealDriver
from recycle_pp.fitting.problem import initial_problem
from recycle_pp.protocol.assignment import exchanged, initial
from recycle_pp.protocol.events import Outcome, ProblemChanged, WorkerDied, WorkerReady
from recycle_pp.storage.store import StoreError
from recycle_pp.telemetry.checkpoint_folders import step_of
from recycle_pp.wire.messages.handshake import SupervisorHello
from recycle_pp.wire.messages.saving import Assembled, Assembling, Saved
from recycle_pp.wire.messages.supervisors import Death, Died, Dying, Kill, Spawn

from .states import Driver, job_state

SEGFAULT = Death("signal", "SIGSEGV")


class Supervisor:
    def __init__(self):
        self.received = []

    def send(self, message):
        self.received.append(type(message))


@pytest.fixture
def of():
    """A job with one running worker, and the `Deaths` under test."""

    class Of:
        job = SimpleNamespace(committed=3, live=set(), first_step=0, assignment=initial(1, 1))
        state, supervisor = job_state(Settings(run=Run(respawns=1)), job), Supervisor()
        recorder = state.recorder
        rank = state.roster.enter(0)
        rank.supervisor, rank.incarnation, rank.alive = supervisor, 0, True
        deaths = deaths_of(state, Driver())

    return Of


def deaths_of(state, driver):
    return Deaths(state, driver, AfterCommit(state, driver))


async def _dies(of, cause):
    of.deaths.reported(of.rank, Died(0, cause, asked=False))


def test_a_worker_that_crashes_is_restarted(of):
    asyncio.run(_dies(of, SEGFAULT))
    assert of.recorder.causes == ["signal"]
    assert of.recorder.events == ["respawned"] and of.supervisor.received == [Spawn]


def test_a_worker_that_dies_too_often_is_given_up(of):
    of.rank.respawns = 1
    asyncio.run(_dies(of, SEGFAULT))
    assert of.recorder.events == ["given_up"] and of.supervisor.received == []


def test_a_worker_killed_by_an_injected_fault_is_not_restarted(of):
    asyncio.run(_dies(of, Death("signal", "SIGSEGV", injected=True)))
    assert of.recorder.causes == ["signal"] and of.recorder.events == of.supervisor.received == []


def test_a_death_reported_twice_is_recorded_once(of):
    async def seen_twice():
        of.deaths.disconnected(of.rank, 0)
        of.deaths.dying(of.rank, Dying(0, at=1.0))
        await _dies(of, SEGFAULT)  # then its supervisor reports the cause
        await _dies(of, SEGFAULT)
        of.state.lifecycle.stop("the end")

    asyncio.run(seen_twice())
    assert of.recorder.causes == ["signal"] and of.supervisor.received == [Spawn]


def test_a_worker_that_a_new_coordinator_finds_dead_is_restarted(of):
    async def finds():
        of.rank.alive, of.rank.causes[0] = False, SEGFAULT
        of.deaths.found_after_failover(of.rank, begun=True)

    asyncio.run(finds())
    assert of.recorder.causes == ["signal"] and of.recorder.events == ["found_dead", "respawned"]


def test_a_death_at_the_end_of_the_job_is_recorded(of):
    async def ends():
        of.deaths.disconnected(of.rank, 0)
        of.state.lifecycle.stop("the end")
        of.state.lifecycle.stop("the end")

    asyncio.run(ends())
    assert of.recorder.causes == ["unknown"] and of.supervisor.received == []


FOUND = Whole(5)


class Silent:
    """Replaces `newest_whole`: the store does not answer, and the newest checkpoint in the folder has `step` steps."""

    def __init__(self, step):
        self._step = step

    def __call__(self, folder, store=None):
        if store is not None:
            raise StoreError(f"{store} did not answer")
        return Whole(self._step)


def loses_a_stage(monkeypatch, savers=(), whole=FOUND, saved=0, dying=(), store=None, nodes="aa", assembled=None):
    """The state and the ranks of a job that has lost its stage 1 and restarts from a checkpoint.

    savers     members that wrote a part of another checkpoint when the stage was lost
    whole      the checkpoint that is found, or a function instead of `newest_whole`
    saved      number of steps in the newest checkpoint that the coordinator knows
    dying      members that die while the job waits for the causes of deaths; their own causes are known later
    nodes      names of the nodes of the two survivors
    assembled  the newer checkpoint that member 0 finishes soon after the loss
    """
    faults = {"fail_at": ["3:0.1", "3:1.1"], "rejoin_at": ["20:0.1", "30:1.1"]}
    settings = Settings(parallel=Parallel(pipelines=2, stages=2), checkpoint=Checkpoint(store=store), **faults)
    state = job_state(settings)
    monkeypatch.setattr(
        "recycle_pp.coordinator.checkpoints.newest_whole", whole if callable(whole) else lambda *_: whole
    )
    state.saving._newest = saved
    job, ranks = state.job, [state.roster.enter(number) for number in range(4)]

    async def dies():
        driver = RealDriver(state, SimpleNamespace(agree=asyncio.sleep))
        after_commit = AfterCommit(state, driver)
        deaths = Deaths(state, driver, after_commit)
        driver.handlers = (after_commit, deaths)
        for rank in ranks:
            rank.incarnation, rank.alive = 0, rank.number != 1
            driver.drive(WorkerReady(rank.number))
            state.digests[rank.role] = {"embedding": "1a2b"}  # as if the worker had finished
        for rank, node in zip((ranks[0], ranks[2]), nodes, strict=True):
            rank.supervisor = Supervisor()
            rank.supervisor.hello = SupervisorHello(rank.number, node, 1)
        driver.drive(WorkerDied(1))
        if savers:
            state.saving.begin(10, savers, False, {0, 2, 3})
        generation = job.generation
        if assembled is not None:
            state.saving.begin(assembled.step, [0], False, [])
            state.saving.assembling(0, Assembling(assembled.step))
        deaths.disconnected(ranks[3], 0)
        for number in dying:
            deaths.dying(ranks[number], Dying(0, at=1.0))
        await asyncio.sleep(2 * CAUSE_SECONDS if dying else 0)
        for number in dying:
            deaths.reported(ranks[number], Died(0, Death("signal", "SIGKILL"), False))
        if assembled is not None:
            await asyncio.sleep(CAUSE_SECONDS + 0.3)
            monkeypatch.setattr("recycle_pp.coordinator.checkpoints.newest_whole", lambda *_: assembled)
            after_commit.assembled(ranks[0], Assembled(assembled.step))
        while job.phase != "starting" and not state.lifecycle.over:  # the checkpoints are read in a thread
            await asyncio.sleep(0.01)
        assert job.generation == generation

    asyncio.run(asyncio.wait_for(dies(), 20))
    return state, ranks


def test_after_the_last_death_of_a_stage_the_survivors_fill_all_stages_and_restart_from_the_checkpoint(monkeypatch):
    state, ranks = loses_a_stage(monkeypatch)
    job = state.job
    assert {ranks[0].role.stage, ranks[2].role.stage} == {0, 1}
    assert ranks[0].supervisor.received == ranks[2].supervisor.received == [Spawn]
    assert job.first_step == 5 and job.committed == 4
    assert job.waiting == {0, 2}
    assert [state.restarts.earliest(ranks[number].role) for number in (1, 3)] == [20, 30], (
        "each dead worker keeps its `+rejoin_at`"
    )
    assert not state.digests  # they are dropped, because fewer workers may sum the repeated steps in another order
    assert state.recorder.events == ["stage_lost"] and not state.lifecycle.over


def test_after_a_restart_from_a_checkpoint_no_checkpoint_waits_for_the_replaced_processes(monkeypatch):
    state, _ = loses_a_stage(monkeypatch, savers=[0, 3])
    assert not state.saving.busy and not state.saving.occupied


def test_workers_that_will_be_restarted_count_as_workers_of_the_restored_job(monkeypatch):
    state, _ = loses_a_stage(monkeypatch, dying=(0, 2), whole=Whole(5, {8: "truncated"}))
    assert state.job.waiting == {0, 2} and not state.lifecycle.over
    assert state.recorder.events.count("checkpoint_damaged") == 1


@pytest.mark.parametrize(("store", "nodes", "uploads"), [("/store", "ab", [5]), ("/store", "aa", []), (None, "ab", [])])
@pytest.mark.parametrize("fails", [False, True])
def test_before_a_restart_a_checkpoint_that_other_nodes_may_lack_is_brought_into_the_store(
    store, nodes, uploads, fails, monkeypatch
):
    uploaded = []

    def upload_late(url, path, settings):
        uploaded.append(step_of(path.name))
        if fails:
            raise StoreError("no keys")

    monkeypatch.setattr("recycle_pp.coordinator.deaths.upload_late", upload_late)
    state, _ = loses_a_stage(monkeypatch, store=store, nodes=nodes)
    assert uploaded == uploads and state.job.first_step == 5
    assert state.recorder.said == ["checkpoint step-000005 is not in the store: no keys"] * (fails and bool(uploads))


def test_a_job_restarts_from_the_checkpoint_that_a_survivor_is_assembling(monkeypatch):
    state, _ = loses_a_stage(monkeypatch, assembled=Whole(8))
    assert state.job.first_step == 8


def test_without_a_checkpoint_all_workers_restart_from_step_0(monkeypatch):
    state, _ = loses_a_stage(monkeypatch, whole=Whole())
    assert state.job.first_step == 0 and not state.lifecycle.over


@pytest.mark.parametrize(("whole", "saved"), [(Whole(0, {5: "truncated"}), 5), (Whole(), 5)])
def test_if_no_checkpoint_can_be_read_the_job_stops_and_does_not_begin_again(whole, saved, monkeypatch):
    state, _ = loses_a_stage(monkeypatch, whole=whole, saved=saved)
    assert state.lifecycle.over


@pytest.mark.parametrize(("going", "restarted"), [({0}, {1, 2}), ({0, 1}, {0, 1, 2})])
def test_a_worker_whose_machine_got_sigterm_is_not_restarted_after_the_loss_of_a_stage(going, restarted, monkeypatch):
    """Its supervisor starts no process. If too few other workers remain, the job is about to end."""
    state = job_state(Settings(parallel=Parallel(pipelines=3, stages=2)))
    monkeypatch.setattr("recycle_pp.coordinator.checkpoints.newest_whole", lambda *_: Whole(5))
    job, ranks = state.job, [state.roster.enter(number) for number in range(6)]
    alive = [rank for rank in ranks if rank.role.stage == 0]

    async def dies():
        driver = RealDriver(state, SimpleNamespace(agree=asyncio.sleep))
        deaths = deaths_of(state, driver)
        driver.handlers = (deaths,)
        for rank in ranks:
            rank.supervisor, rank.incarnation, rank.alive = Supervisor(), 0, True
            driver.drive(WorkerReady(rank.number))
        for n in going:
            alive[n].stopping = True
        for rank in ranks:
            if rank not in alive:
                deaths.disconnected(rank, 0)
        while job.phase != "starting":  # the checkpoints are read in a thread
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(dies(), 20))
    assert job.waiting == {alive[n].number for n in restarted}
    for n, rank in enumerate(alive):
        assert rank.alive == (n in restarted) and rank.supervisor.received == ([Spawn] if n in restarted else [Kill])


@pytest.mark.parametrize("saved", [True, False])
def test_the_loss_of_a_stage_after_the_last_step_changes_nothing_if_its_part_is_saved(saved):
    state = job_state(Settings(parallel=Parallel(pipelines=1, stages=2)))
    job, ranks = state.job, [state.roster.enter(number) for number in range(2)]
    job.live, job.finished, job.committed, job.phase = {0, 1}, {0, 1}, job.steps - 1, "finished"
    state.recorder.finished = lambda digests: None

    async def dies():
        driver = RealDriver(state, SimpleNamespace(agree=asyncio.sleep))
        after_commit = AfterCommit(state, driver)
        deaths = Deaths(state, driver, after_commit)
        state.saving.begin(job.steps, [0, 1], final=True, live={})
        for rank in ranks:
            rank.incarnation, rank.alive = 0, True
        if saved:
            after_commit.saved(ranks[1], Saved(job.steps))
        deaths.disconnected(ranks[1], 0)
        if not saved:
            assert job.phase == "lost" and state.saving.failed
            return
        after_commit.saved(ranks[0], Saved(job.steps))
        assert job.phase == "finished" and not state.lifecycle.over
        after_commit.assembled(ranks[0], Assembled(job.steps))
        assert state.lifecycle.code == 0

    asyncio.run(dies())


def test_a_job_that_restarts_from_an_older_checkpoint_because_the_store_is_silent_says_so(monkeypatch):
    state, _ = loses_a_stage(monkeypatch, whole=Silent(5), saved=8, store="s3://bucket")
    assert state.job.first_step == 5 and not state.lifecycle.over
    (skipped,) = [event for event in state.recorder.whole if event.name() == "checkpoint_damaged"]
    assert (skipped.checkpoint, skipped.detail) == (8, "s3://bucket did not answer")


def test_a_job_does_not_begin_again_if_the_store_is_silent_and_the_folder_has_no_checkpoint(monkeypatch):
    state, _ = loses_a_stage(monkeypatch, whole=Silent(0), store="s3://bucket")
    assert "no checkpoint could be read: s3://bucket did not answer" in state.lifecycle.reason


def test_a_run_folder_that_cannot_be_read_stops_the_job_with_the_reason(monkeypatch):
    def fails(folder, store):
        raise OSError(errno.EIO, "Input/output error")

    state, _ = loses_a_stage(monkeypatch, whole=fails)
    assert "no checkpoint could be read: [Errno 5] Input/output error" in state.lifecycle.reason


def test_a_worker_whose_role_was_taken_over_still_returns_at_its_rejoin_at():
    parallel, death = Parallel(pipelines=2, stages=2), Death("signal", "SIGKILL", injected=True)
    settings = Settings(parallel=parallel, fail_at=["3:1.1", "14:0.1"], rejoin_at=["20:0.1"])
    job = SimpleNamespace(committed=13, live={0, 1, 2}, first_step=0, assignment=initial(2, 2))
    state = job_state(settings, job)
    ranks = [state.roster.enter(number) for number in range(4)]
    for rank in ranks:
        rank.supervisor, rank.incarnation, rank.alive = Supervisor(), 0, rank.number != 3

    class TakesOver(Driver):
        def drive(self, event):
            if isinstance(event, WorkerDied):
                note = {"event": "took_over", "member": 2, "worker": Worker(0, 1), "role": Worker(1, 0)}
                job.assignment = exchanged(job.assignment, 2, Worker(0, 1))
                deaths.handled(event, Outcome([], [note]))

    deaths = deaths_of(state, TakesOver())

    async def dies():
        deaths.reported(ranks[1], Died(0, death, asked=False))
        deaths.handled(None, Outcome([], [{"event": "committed"}]))

    asyncio.run(dies())
    assert [rank.supervisor.received for rank in ranks] == [[], [Spawn], [], []]
    assert ranks[1].role == Worker(1, 0) and state.restarts.earliest(ranks[1].role) == 20


class Replans(Driver):
    """A driver whose job accepts any problem."""

    def __init__(self, job):
        super().__init__()
        self.job = job
        job.in_flight = lambda worker: job.problem.limit(worker)

    def drive(self, event):
        if isinstance(event, ProblemChanged):
            self.job.problem = event.problem


@pytest.mark.parametrize(("cause", "deaths"), [("exception", 2), ("out_of_memory", 6)])
def test_an_op_that_runs_out_of_memory_on_two_workers_is_retried_with_fewer_micro_batches_in_flight(cause, deaths):
    settings = Settings(parallel=Parallel(pipelines=2, stages=1), run=Run(respawns=9))
    problem = initial_problem(settings)
    job = SimpleNamespace(committed=3, live=set(), first_step=0, problem=problem, assignment=initial(2, 1))
    state = job_state(settings, job)
    ranks = [state.roster.enter(number) for number in range(2)]
    limit = job.problem.limit(ranks[0].role)
    assert limit == 3  # 1F1B needs one micro-batch in flight, and memory_extra adds two

    async def die():
        said = Death(cause, "no more", where="F of micro-batch 0.1 in step 4")
        of = deaths_of(state, Replans(job))
        for number in range(20):
            if state.lifecycle.over:
                return number
            rank = ranks[number % 2]
            rank.supervisor, rank.incarnation, rank.alive = Supervisor(), number, True
            of.reported(rank, Died(number, said, asked=False))

    assert asyncio.run(die()) == deaths
    if cause == "out_of_memory":
        assert [job.problem.limit(rank.role) for rank in ranks] == [1, 1]


def test_the_cause_of_a_death_counts_for_the_role_that_an_understudy_has_taken_over():
    settings = Settings(parallel=Parallel(pipelines=2, stages=2))
    job = SimpleNamespace(committed=3, live=set(), first_step=0, problem=initial_problem(settings))
    job.assignment = initial(2, 2)
    state = job_state(settings, job)
    rank = state.roster.enter(1)
    rank.supervisor, rank.incarnation, rank.alive = Supervisor(), 0, True

    class TakesOver(Replans):
        def drive(self, event):
            super().drive(event)
            if isinstance(event, WorkerDied):
                job.assignment = exchanged(job.assignment, 2, rank.role)

    was, now = job.assignment[1], job.assignment[2]
    limits = {role: job.problem.limit(role) for role in (was, now)}
    death = Death("out_of_memory", "no more", where="F of micro-batch 0.1 in step 4")
    deaths = deaths_of(state, TakesOver(job))

    async def dies():
        deaths.reported(rank, Died(0, death, asked=False))

    asyncio.run(dies())
    assert rank.role == now
    assert {role: limits[role] - job.problem.limit(role) for role in limits} == {was: 1, now: 0}
