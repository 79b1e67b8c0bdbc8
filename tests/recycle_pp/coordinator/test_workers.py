"""Handling workers' messages."""

import pytest

from recycle_pp.config.settings import Model, Parallel, Run, Settings
from recycle_pp.coordinator.after_commit import AfterCommit
from recycle_pp.coordinator.workers import Workers
from recycle_pp.protocol.events import WorkerReady
from recycle_pp.wire.messages.lifecycle import Ready
from recycle_pp.wire.messages.saving import Assembled

from .states import Driver, job_state


class Replans(Driver):
    """A driver that only changes the problem of its job."""

    def __init__(self, state):
        super().__init__()
        self._state = state

    def change(self, problem):
        self._state.job.problem = problem


def workers_of(state, driver):
    class Links:
        broken = unreachable = None

    return Workers(state, driver, AfterCommit(state, driver), deaths=None, hangs=None, links=Links)


@pytest.mark.parametrize(("ends", "expected"), [(False, ["checkpoint_saved"]), (True, ["stopped"])])
def test_the_last_line_is_the_reason_of_the_stop_even_if_a_checkpoint_finishes_later(ends, expected, tmp_path):
    state = job_state(folder=tmp_path)
    workers = workers_of(state, Driver())
    if ends:
        state.lifecycle.stop("memory has failed")
    workers.handle(state.roster.enter(0), Assembled(8))
    assert state.recorder.events == expected and state.saving.newest().name == "step-000008"


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
    assert state.job.problem is problem, "equal peers"
    assert [type(event) for event in driver.driven].count(WorkerReady) == 3
