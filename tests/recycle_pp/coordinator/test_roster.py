"""The roster of ranks: connections, roles, messages to many workers."""

import asyncio
from types import SimpleNamespace

import pytest
from recycle_schedules import Worker

from recycle_pp.config.settings import Settings
from recycle_pp.coordinator.roster import Roster
from recycle_pp.protocol.assignment import initial
from recycle_pp.protocol.events import Send
from recycle_pp.wire.messages.handshake import SupervisorHello
from recycle_pp.wire.messages.lifecycle import Exit, StoreValues
from recycle_pp.wire.messages.steps import Commit
from recycle_pp.wire.messages.workers import TO_WORKER


class Connection:
    """A worker's connection that keeps the messages sent to it."""

    def __init__(self):
        self.frames = []

    def send_frame(self, frame):
        self.frames.append(frame)

    @property
    def messages(self):
        return [TO_WORKER.decode(frame[4:]) for frame in self.frames]


def roster(lost=()):
    settings = Settings()
    parallel = settings.parallel
    made = Roster(settings, lambda: initial(parallel.pipelines, parallel.stages))
    for number in range(parallel.pipelines * parallel.stages):
        rank = made.enter(number)
        rank.incarnation, rank.place = 0, ("127.0.0.1", number)
        rank.supervisor = None if number in lost else object()
    return made


def test_a_rank_is_created_once_and_starts_in_its_own_role():
    made = roster()
    assert made.enter(6) is made[6]
    assert made[6].role == Worker(1, 2)
    assert made.complete and [rank.number for rank in made] == list(range(12))


def test_only_addresses_of_connected_supervisors_are_returned():
    assert set(roster(lost=[3, 6]).places()) == set(range(12)) - {3, 6}


def connected(agent, ranks):
    return SimpleNamespace(hello=SupervisorHello(0, "node", 1, agent, ranks))


def test_an_agent_that_has_lost_a_supervisor_or_all_workers_is_not_counted():
    made = roster()
    for rank in made:  # four agents with three ranks each; a new node has rank 11
        rank.supervisor = connected(None if rank.number == 11 else rank.number // 3, 3)
        rank.alive = rank.number not in (0, 3, 4, 5)
    assert made.agents() == {0, 2}  # one worker of agent 0 is dead, but its supervisor is alive
    made[7].supervisor = None
    assert made.agents() == {0}


def with_workers(numbers):
    made = roster()
    for number in numbers:
        made[number].worker = Connection()
    return made


def test_a_message_to_many_workers_is_encoded_once():
    made, same = with_workers(range(11)), Commit(0, 7, scale=1.0, norm=1.0, loss=1.0)
    made.deliver([*(Send(rank.number, same) for rank in made), Send(0, Exit())])
    assert made[0].worker.messages == [same, Exit()]
    assert len({id(made[number].worker.frames[0]) for number in range(11)}) == 1


def test_values_published_at_the_same_time_are_sent_in_few_messages():
    made = with_workers(range(12))

    async def publish():
        for number in range(12):
            made.publish("*", b"of %d" % number)
        while not made[11].worker.frames:
            await asyncio.sleep(0.001)

    asyncio.run(publish())
    assert {len(made[number].worker.frames) for number in range(12)} == {1}
    (message,) = made[0].worker.messages
    assert message == StoreValues([("*", b"of %d" % number) for number in range(12)])


@pytest.mark.parametrize(("lost", "free"), [((), None), ((3,), 3), ((3, 6, 10), 6)])
def test_a_new_worker_joins_the_stage_with_the_fewest_live_workers(lost, free):
    made = roster(lost=lost)
    live = {rank.role for rank in made if rank.number not in lost}
    found = made.free(live)
    assert (found and found.number) == free
