"""Who is there, who is free, who is silent."""

import asyncio
import time

import pytest
from recycle_schedules import Worker

from recycle_pp.config.settings import Control, Settings
from recycle_pp.coordinator.roster import Roster
from recycle_pp.protocol.job import Send
from recycle_pp.wire.messages.supervisors import CoordinatorHeartbeat
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


class Supervisor:
    """A connection that keeps what is sent."""

    def __init__(self):
        self.heard, self.aborted = [], False

    def send(self, message):
        self.heard.append(message)

    def abort(self):
        self.aborted = True


def roster(*, heartbeat=0.01, suspicion=0.1, lost=()):
    settings = Settings(control=Control(heartbeat=heartbeat, suspicion=suspicion))
    made = Roster(settings)
    for number in range(settings.parallel.pipelines * settings.parallel.stages):
        rank = made.enter(number)
        rank.incarnation, rank.place = 0, ("127.0.0.1", number)
        rank.supervisor = None if number in lost else Supervisor()
    return made


async def watched(made, seconds, meanwhile=lambda: None):
    """Ranks whose workers were found to hang."""
    hung = []

    def hangs(rank, silent):
        rank.alive = False
        hung.append(rank.number)

    watch = asyncio.create_task(made.watch(hangs))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        await asyncio.sleep(0.002)
        meanwhile()
    watch.cancel()
    return hung


def test_a_rank_is_made_once_and_begins_in_its_own_place():
    made = roster()
    assert made.enter(6) is made[6]
    assert made[6].role == Worker(1, 2)
    assert made.complete and [rank.number for rank in made] == list(range(12))


def test_only_places_of_supervisors_that_are_there_are_given():
    assert set(roster(lost=[3, 6]).places()) == set(range(12)) - {3, 6}


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


def test_a_worker_that_is_silent_is_found_once_and_one_that_beats_is_not():
    made = roster()
    for rank in made:
        rank.alive, rank.heard, rank.patience = rank.number < 2, time.monotonic(), 0.1

    def beat():
        made[0].heard = time.monotonic()
        for rank in made:
            rank.unheard = 0

    assert asyncio.run(watched(made, 0.5, beat)) == [1]


def test_a_supervisor_that_is_silent_is_cut_off():
    made = roster()

    def beat():
        for rank in made:
            rank.unheard = rank.unheard if rank.number == 4 else 0

    asyncio.run(watched(made, 0.5, beat))
    assert [rank.number for rank in made if rank.supervisor.aborted] == [4]
    assert CoordinatorHeartbeat() in made[4].supervisor.heard


def test_who_slept_itself_calls_nobody_silent():
    made = roster(suspicion=0.2)
    for rank in made:
        rank.alive, rank.heard, rank.patience = True, time.monotonic(), 0.2

    async def sleep_for_a_while():
        watch = asyncio.create_task(watched(made, 0.05))
        await asyncio.sleep(0.02)
        time.sleep(0.5)  # the whole process stands still
        return await watch

    assert asyncio.run(sleep_for_a_while()) == []
