"""How a coordinator handles workers' connections and messages."""

from types import SimpleNamespace

import pytest

from recycle_pp.config.settings import Checkpoint, Model, Parallel, Run, Settings
from recycle_pp.coordinator.after_commit import AfterCommit
from recycle_pp.coordinator.job import new_job
from recycle_pp.coordinator.rounds import Rounds
from recycle_pp.coordinator.workers import Workers
from recycle_pp.protocol.events import WorkerReady
from recycle_pp.wire.messages.handshake import WorkerHello
from recycle_pp.wire.messages.lifecycle import Ready
from recycle_pp.wire.messages.saving import Assembled, Sealed, UploadFailed

from .states import Driver, job_state


class Replans(Driver):
    """A driver that only changes the problem of its job."""

    def __init__(self, state):
        super().__init__()
        self._state = state

    def change(self, problem):
        self._state.job.problem = problem


def workers_of(state, driver, deaths=None):
    class Links:
        broken = unreachable = None

    operators = SimpleNamespace(profiled=None)
    return Workers(state, driver, AfterCommit(state, driver), deaths, None, Links, None, operators, Rounds(state))


@pytest.mark.parametrize(("phase", "loads"), [("starting", 80), ("running", 0), ("reporting", 0), ("holding", 0)])
def test_only_the_workers_of_the_first_generation_load_the_checkpoint(phase, loads):
    """A later worker gets the state of a peer, because the checkpoint may have been deleted meanwhile."""
    sent = []
    state = job_state(job=new_job(Settings(), 80))
    state.job.phase = phase
    rank = state.roster.enter(3)
    rank.spawn()
    workers = workers_of(state, Driver())
    assert workers.welcome(SimpleNamespace(send=sent.append), WorkerHello(3, rank.incarnation, moved=False)) is rank
    assert [message.resume for message in sent] == [loads]


@pytest.mark.parametrize(
    ("phase", "committed", "joins"), [("starting", 79, False), ("running", 79, False), ("running", 80, True)]
)
def test_only_a_worker_that_joins_after_a_commit_needs_no_initial_values(phase, committed, joins):
    """Before the first commit it may have to give its initial values to others."""
    sent = []
    state = job_state(job=new_job(Settings(), 80))
    state.job.phase, state.job.committed = phase, committed
    rank = state.roster.enter(3)
    rank.spawn()
    peer = SimpleNamespace(send=sent.append)
    workers_of(state, Driver()).welcome(peer, WorkerHello(3, rank.incarnation, moved=False))
    assert [message.joins for message in sent] == [joins]


def test_a_new_process_builds_its_stage_with_its_current_layers():
    sent = []
    state = job_state(Settings(model=Model(layers=8), parallel=Parallel(3, 4)))
    state.job.phase = "running"
    state.job.units.layout = {0: [-1, 0, 1, 2], 1: [3], 2: [4, 5], 3: [6, 7, 8]}
    rank = state.roster.enter(3)
    rank.spawn()
    peer = SimpleNamespace(send=sent.append)
    workers_of(state, Driver()).welcome(peer, WorkerHello(3, rank.incarnation, moved=False))
    assert [message.settings.model.split for message in sent] == [[3, 1, 2, 2]]


def test_a_worker_that_describes_its_changed_stage_keeps_its_measured_times():
    state, placed = job_state(), []
    state.profile.place = lambda *of: placed.append(of)
    workers, rank = workers_of(state, Driver()), state.roster.enter(0)
    for port in (1, 1, 2):
        workers.handle(rank, Ready(("host", port), "", machine="a", cores=4))
    assert placed == [(rank.role, "a", 4)] * 2, "the second process is new"


@pytest.mark.parametrize(("phase", "event"), [("starting", "stopped"), ("running", "refused")])
def test_a_worker_with_different_frozen_weights_stops_a_start_and_is_refused_later(phase, event):
    state, driver, sent = job_state(), Driver(), []
    workers = workers_of(state, driver)
    for number, origin in enumerate(("one", "one", "other")):
        if number == 2:
            state.job.phase = phase
            assert not state.recorder.events
        rank = state.roster.enter(number)
        rank.worker = SimpleNamespace(send=sent.append)
        workers.handle(rank, Ready(("host", 1), "", origin=origin))
    assert state.recorder.events == [event] and len(sent) == (event == "refused")
    assert [type(event) for event in driver.driven].count(WorkerReady) == 2


@pytest.mark.parametrize(("ends", "expected"), [(False, ["checkpoint_saved"]), (True, ["stopped"])])
def test_the_last_line_is_the_reason_of_the_stop_even_if_a_checkpoint_finishes_later(ends, expected, tmp_path):
    state = job_state(folder=tmp_path)
    workers = workers_of(state, Driver())
    if ends:
        state.lifecycle.stop("memory has failed")
    workers.handle(state.roster.enter(0), Assembled(8))
    assert state.recorder.events == expected and state.saving.newest().name == "step-000008"


def storing_workers(tmp_path):
    """Handlers of a job of one worker with a store, and its rank."""
    settings = Settings(checkpoint=Checkpoint(store="/store"), parallel=Parallel(1, 1), run=Run(steps=24))
    state = job_state(settings, folder=tmp_path)
    state.job.live.add(0)
    return state, workers_of(state, Driver()), state.roster.enter(0)


def assembled(step, whole=True):
    return Assembled(step, whole, ["stage-0-0-aa"])


def test_a_checkpoint_that_is_due_during_an_upload_stays_on_the_disk(tmp_path):
    state, workers, rank = storing_workers(tmp_path)
    workers.handle(rank, assembled(8))
    workers.handle(rank, assembled(16))
    workers.handle(rank, Sealed(8))
    assert state.recorder.events == [
        "checkpoint_saved", "checkpoint_saved", "checkpoint_not_stored", "checkpoint_stored"
    ]  # fmt: skip
    assert "step-000008 is still being uploaded; none was stored in" in state.recorder.whole[2].text()


def test_without_a_common_folder_a_checkpoint_counts_once_it_is_stored(tmp_path):
    state, workers, rank = storing_workers(tmp_path)
    workers.handle(rank, assembled(8, whole=False))
    assert state.recorder.events == [] and state.saving.newest() is None
    workers.handle(rank, Sealed(8))
    assert state.recorder.events == ["checkpoint_stored"] and state.saving.newest() == "/store/step-000008"


def test_an_assembler_that_repeats_its_message_starts_no_second_upload(tmp_path):
    state, workers, rank = storing_workers(tmp_path)
    for message in (assembled(8), Sealed(8), assembled(8), UploadFailed(8, "late")):
        workers.handle(rank, message)
    assert not state.storing.busy and "checkpoint_not_stored" not in state.recorder.events


def test_the_last_checkpoint_of_a_run_replaces_an_unfinished_upload(tmp_path):
    state, workers, rank = storing_workers(tmp_path)
    state.timers.after = lambda *_: None  # the real one needs an event loop
    workers.handle(rank, assembled(8))
    workers.handle(rank, assembled(24))
    assert (state.storing.step, state.storing.final) == (24, True)
    workers.handle(rank, UploadFailed(24, "refused"))
    assert state.storing.failed_last and state.recorder.events[-1] == "checkpoint_not_stored"


def test_measured_memory_limits_the_plans_and_selects_the_stages_that_recompute():
    settings = Settings(
        model=Model(kind="custom", recompute="auto"), parallel=Parallel(2, 2, memory="310MB"), run=Run(device="cpu")
    )
    state = job_state(settings)
    driver = Replans(state)
    workers = workers_of(state, driver)
    takes = [{"weights": 0.0, "flight": flight} for flight in (8e6, 1e6)]
    for number in range(2):
        assert state.job.problem.memory is None
        workers.handle(state.roster.enter(number), Ready(("", 0), "", memory=takes))
    problem = state.job.problem
    assert problem.recomputes == (True, True) and problem.limit(state.roster[0].role) == 1
    workers.handle(state.roster.enter(2), Ready(("", 0), "", memory=[{"flight": 0.0}] * 2))
    assert state.job.problem is problem, "the first report of a stage is used, because peers are equal"
    assert [type(event) for event in driver.driven].count(WorkerReady) == 3


@pytest.fixture
def of():
    """Rank 0 with a new process. later: delayed calls. lost: incarnations whose connection counts as broken."""
    state, lost, later = job_state(), [], []
    state.timers = SimpleNamespace(after=lambda seconds, call, *arguments: later.append(lambda: call(*arguments)))
    deaths = SimpleNamespace(disconnected=lambda rank, incarnation: lost.append(incarnation))
    rank = state.roster.enter(0)
    rank.incarnation, rank.alive = 0, True
    return SimpleNamespace(
        workers=workers_of(state, Driver(), deaths), job=state.job, rank=rank, lost=lost, later=later
    )


def connect(of):
    peer = SimpleNamespace(was_reset=False, send=lambda message: None)
    assert of.workers.welcome(peer, WorkerHello(0, 0, moved=False)) is of.rank
    return peer


def test_a_worker_that_reconnects_after_a_slow_admission_is_not_lost(of):
    """On a busy machine the answer can come after the worker's time limit of a second."""
    of.workers.lost(of.rank, 0, connect(of))
    connect(of)
    (has_not_returned,) = of.later
    has_not_returned()
    assert of.lost == []


def test_a_worker_that_does_not_reconnect_is_lost(of):
    of.workers.lost(of.rank, 0, connect(of))
    assert of.lost == []
    of.later[0]()
    assert of.lost == [0]


def test_a_member_whose_connection_ends_is_lost_at_once(of):
    of.job.live.add(of.rank.number)
    of.workers.lost(of.rank, 0, connect(of))
    assert of.lost == [0] and not of.later
