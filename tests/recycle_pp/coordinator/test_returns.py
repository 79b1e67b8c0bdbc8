"""A worker of a new or returning node is started only when its node can reach all others."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from recycle_pp.config.settings import Parallel, Settings
from recycle_pp.coordinator import returns as module
from recycle_pp.coordinator.returns import Returns
from recycle_pp.wire.messages.agreement import Place
from recycle_pp.wire.messages.handshake import SupervisorHello
from recycle_pp.wire.messages.supervisors import Probe, Probed, Spawn, Target

from .states import job_state

AGAIN = 0.05


class Supervisor:
    def __init__(self, rank, host):
        self.hello, self.received = SupervisorHello(rank, host, 1, rank), []

    def send(self, message):
        self.received.append(message)


@pytest.fixture
def of(monkeypatch):
    """Three nodes with one worker each; the last node's worker is dead."""
    monkeypatch.setattr(module, "AGAIN_SECONDS", AGAIN)
    settings = Settings(parallel=Parallel(pipelines=3, stages=1))
    state = job_state(settings)
    for number in range(3):
        rank = state.roster.enter(number)
        rank.supervisor, rank.place = Supervisor(number, f"node{number}"), Place(f"10.0.0.{number}", 4000)
        rank.incarnation, rank.alive = 0, number < 2
    recorder, roster = state.recorder, state.roster
    return SimpleNamespace(
        returns=Returns(state), roster=roster, rank=roster[2], said=recorder.said, events=recorder.events
    )


def kinds(of):
    return [type(message) for message in of.rank.supervisor.received]


def test_a_worker_is_started_when_its_node_reaches_the_nodes_of_all_live_workers(of):
    async def main():
        of.returns.newcomer(of.rank)
        assert of.rank.supervisor.received == [
            Probe([Target("node0", "10.0.0.0", 4000), Target("node1", "10.0.0.1", 4000)])
        ]
        of.returns.probed(of.rank, Probed(["node1 (10.0.0.1:4000)"]))
        assert of.returns.cut == {2: "node2 cannot reach node1 (10.0.0.1:4000)"} and not of.rank.alive
        await asyncio.sleep(3 * AGAIN)
        assert kinds(of) == [Probe, Probe]
        of.returns.probed(of.rank, Probed(["node1 (10.0.0.1:4000)"]))
        of.returns.probed(of.rank, Probed([]))
        await asyncio.sleep(3 * AGAIN)

    asyncio.run(main())
    assert kinds(of) == [Probe, Probe, Spawn] and of.rank.alive
    assert of.events == ["node_joined"] and not of.returns.cut
    assert len(of.said) == 1, "the same link is reported once"


def test_the_wait_doubles_for_a_worker_that_had_to_leave_again(of):
    async def main():
        for wait in (1, 2, 4):
            of.rank.alive, of.rank.supervisor.received = False, []
            begun = time.monotonic()
            of.returns.cut_off(of.rank, ["node0"])
            while not kinds(of):
                await asyncio.sleep(AGAIN / 10)
            assert time.monotonic() - begun > (wait - 0.1) * AGAIN
            assert kinds(of) == [Probe]
            of.returns.probed(of.rank, Probed([]))
            assert of.rank.alive

    asyncio.run(main())
    assert of.events == ["link_restored"] * 3


def test_a_node_that_is_replaced_while_it_waits_is_not_started(of):
    async def main():
        of.returns.cut_off(of.rank, ["node0"])
        gone, of.rank.supervisor = of.rank.supervisor, Supervisor(2, "node3")
        await asyncio.sleep(2 * AGAIN)
        assert gone.received == []
        of.returns.newcomer(of.rank)
        of.returns.probed(of.rank, Probed([]))

    asyncio.run(main())
    assert kinds(of) == [Probe, Spawn] and of.events == ["node_joined"]


def test_on_one_machine_no_link_is_probed(of):
    for rank in of.roster:
        rank.supervisor = Supervisor(rank.number, "node0")

    async def main():
        of.returns.reconnected(of.rank)

    asyncio.run(main())
    assert kinds(of) == [Spawn] and of.events == []
