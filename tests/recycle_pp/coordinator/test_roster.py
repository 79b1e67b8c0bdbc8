"""Who is there, and who is free."""

import asyncio
from types import SimpleNamespace

import pytest
from recycle_schedules import Worker

from recycle_pp.config.settings import Settings
from recycle_pp.coordinator.roster import Roster
from recycle_pp.protocol.events import Send
from recycle_pp.wire.messages.handshake import SupervisorHello
from recycle_pp.wire.messages.workers import TO_WORKER, Commit, Exit, StoreValues


class Connection:
    """Of a worker: keeps what it is sent."""

    def __init__(self):
        self.frames = []

    def send_frame(self, frame):
        self.frames.append(frame)

    @property
    def messages(self):
        return [TO_WORKER.decode(frame[4:]) for frame in self.frames]


def roster(lost=()):
    settings = Settings()
    made = Roster(settings)
    for number in range(settings.parallel.pipelines * settings.parallel.stages):
        rank = made.enter(number)
        rank.incarnation, rank.place = 0, ("127.0.0.1", number)
        rank.supervisor = None if number in lost else object()
    return made


def test_a_rank_is_made_once_and_begins_in_its_own_place():
    made = roster()
    assert made.enter(6) is made[6]
    assert made[6].role == Worker(1, 2)
    assert made.complete and [rank.number for rank in made] == list(range(12))


def test_only_places_of_supervisors_that_are_there_are_given():
    assert set(roster(lost=[3, 6]).places()) == set(range(12)) - {3, 6}


def connected(agent, ranks):
    return SimpleNamespace(hello=SupervisorHello(0, "node", 1, agent, ranks))


def test_an_agent_that_has_lost_a_supervisor_or_all_workers_will_not_end_with_the_job():
    made = roster()
    for rank in made:  # four agents with three ranks each, and a newcomer in the place of rank 11
        rank.supervisor = connected(None if rank.number == 11 else rank.number // 3, 3)
        rank.alive = rank.number not in (0, 3, 4, 5)
    assert made.agents() == {0, 2}  # one worker of agent 0 is dead, its supervisor is not
    made[7].supervisor = None
    assert made.agents() == {0}


def with_workers(numbers):
    made = roster()
    for number in numbers:
        made[number].worker = Connection()
    return made


def test_a_message_to_many_is_written_once():
    made, same = with_workers(range(11)), Commit(0, 7, scale=1.0, norm=1.0, loss=1.0)
    made.deliver([*(Send(rank.role, same) for rank in made), Send(made[0].role, Exit())])
    assert made[0].worker.messages == [same, Exit()]
    assert len({id(made[number].worker.frames[0]) for number in range(11)}) == 1


def test_what_workers_publish_at_the_same_time_reaches_everybody_in_few_messages():
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
def test_a_newcomer_goes_where_the_fewest_live(lost, free):
    made = roster(lost=lost)
    live = {rank.role for rank in made if rank.number not in lost}
    found = made.free(live)
    assert (found and found.number) == free
