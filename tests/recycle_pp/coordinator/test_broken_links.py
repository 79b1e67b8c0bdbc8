"""Which worker leaves if a link between two workers is cut, or if its links fail again and again."""

import asyncio
from types import SimpleNamespace

import pytest
from recycle_schedules import Worker

from recycle_pp.config.settings import Control, Parallel, Settings
from recycle_pp.coordinator import broken_links as module
from recycle_pp.coordinator.broken_links import BrokenLinks
from recycle_pp.wire.messages.generations import Broken, Unreachable

from .states import Driver, job_state


@pytest.fixture
def of(monkeypatch):
    """Three nodes with one running worker each."""
    monkeypatch.setattr(module, "_OTHER_END_SECONDS", 0.01)
    monkeypatch.setattr(module, "_BROKEN_SECONDS", 0.01)
    state = job_state(Settings(parallel=Parallel(pipelines=3, stages=1), control=Control(heartbeat=1.0, suspicion=5.0)))
    state.job.live = {0, 1, 2}
    for number in range(3):
        rank = state.roster.enter(number)
        rank.incarnation, rank.alive = 0, True
    ended = []
    deaths = SimpleNamespace(end=lambda rank, cause, detail: ended.append(rank.role))
    links = BrokenLinks(state, Driver(), deaths, SimpleNamespace(cut_off=lambda rank, hosts: None))
    return SimpleNamespace(links=links, roster=state.roster, ended=ended, recorder=state.recorder, job=state.job)


def cut(of, one, other):
    async def main():
        of.links.unreachable(of.roster[one], Unreachable([other]))
        of.links.unreachable(of.roster[other], Unreachable([one]))
        await asyncio.sleep(0.05)

    asyncio.run(main())


def test_of_two_workers_that_reach_the_coordinator_one_leaves(of):
    cut(of, 1, 2)
    assert of.ended == [Worker(2, 0)]
    (event,) = of.recorder.whole
    assert (event.cut, event.leaving) == (["1.0 2.0"], ["2.0"])
    assert event.text().startswith("workers 1.0 and 2.0 cannot connect to each other; 2.0 will leave")


def fail(of, generation, *members):
    async def main():
        of.job.generation = generation
        for member in members:
            of.links.broken(of.roster[member], Broken(generation, "unhandled system error"))
        await asyncio.sleep(0.05)

    asyncio.run(main())


def test_links_that_keep_failing_in_a_step_end_the_worker_that_reports_it_first(of):
    for generation in range(3):
        fail(of, generation, 1)
    assert of.ended == [] and [event.reason for event in of.recorder.whole] == ["unhandled system error"] * 3
    assert of.recorder.events == ["link_failed"] * 3
    fail(of, 3, 1)
    assert of.ended == [Worker(1, 0)] and len(of.recorder.whole) == 3


def test_links_that_fail_in_different_steps_end_no_worker(of):
    for generation in range(6):
        of.job.committed = generation
        fail(of, generation, 1)
    assert of.ended == []


def test_no_worker_leaves_for_a_link_to_a_node_that_is_silent_itself(of):
    """If the coordinator's node is at one end of the cut, it receives no heartbeats from the other end. That node will
    soon count as lost, so no second worker must leave."""
    of.roster[1].missed_heartbeats = 3
    cut(of, 1, 2)
    assert of.ended == []


def test_a_late_heartbeat_is_not_silence(of):
    of.roster[1].missed_heartbeats = 2
    cut(of, 1, 2)
    assert of.ended == [Worker(2, 0)]
