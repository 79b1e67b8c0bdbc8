"""Which workers a new coordinator waits for."""

import asyncio

import pytest
from recycle_schedules import Worker

from recycle_pp.coordinator.failover_discovery import FailoverDiscovery
from recycle_pp.wire.messages.agreement import Place
from recycle_pp.wire.messages.supervisors import Death, Died, Registration, Spawn
from recycle_pp.wire.messages.workers import State

MEMBERS = {0: Worker(0, 0), 1: Worker(0, 1)}
JOINS = State()
TAKES_PART = State(generation=3, members=MEMBERS, committed=7, agreed=(0, 3))


async def found(reports, seconds):
    """The states that a discovery has at its end. reports: rank, 0 to 2 -> (seconds until it arrives, state)."""
    discovery = FailoverDiscovery("")
    loop = asyncio.get_running_loop()
    for rank in range(3):
        place = Place("127.0.0.1", 1)
        discovery.receive(rank, Registration(place, Spawn(0, (rank // 2, rank % 2), 0), True, []), None)
        if rank in reports:
            after, state = reports[rank]
            loop.call_later(after, discovery.worker, rank, 0, state, None)
    await discovery.complete({}, seconds)
    return discovery.states()


@pytest.mark.parametrize("joiner", [0.0, 0.1, 0.3])
def test_the_discovery_waits_for_all_members_even_if_a_joiner_reports_first(joiner):
    states = asyncio.run(found({0: (0.1, TAKES_PART), 1: (0.2, TAKES_PART), 2: (joiner, JOINS)}, 20.0))
    assert states.keys() >= set(MEMBERS)


def test_the_discovery_does_not_wait_for_a_joiner():
    states = asyncio.run(asyncio.wait_for(found({0: (0.0, TAKES_PART), 1: (0.0, TAKES_PART)}, 60.0), 20.0))
    assert states.keys() == set(MEMBERS)


def test_the_death_of_an_earlier_process_does_not_count_for_the_next_one():
    """The supervisor kills the earlier process first, so its death may arrive during the discovery."""
    discovery = FailoverDiscovery("")
    discovery.receive(0, Registration(Place("127.0.0.1", 1), Spawn(1, (0, 0), 0), True, []), None)
    discovery.worker(0, 1, TAKES_PART, None)
    deaths = [Died(number, Death("signal", "SIGKILL", 0.0), asked=False) for number in (0, 1)]
    discovery.receive(0, deaths[0], None)
    assert discovery.alive and discovery.states() == {0: TAKES_PART}
    discovery.receive(0, deaths[1], None)
    assert not discovery.alive and discovery.supervisors[0].report.deaths == deaths
