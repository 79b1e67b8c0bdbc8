"""A generation starts only after the supervisors have agreed on it."""

import asyncio
from types import SimpleNamespace

import msgspec
from recycle_schedules import Worker

from recycle_pp.coordinator.driver import Driver
from recycle_pp.protocol.events import Send
from recycle_pp.wire.messages.generations import Adopt, Announce, Shares
from recycle_pp.wire.messages.steps import Commit

from ..coordinator.held_lease import HeldLease

A, B = 0, 1
MEMBERS = {A: Worker(0, 0), B: Worker(1, 0)}
PLACES = {0: ("host", 1), 1: ("host", 2)}


class Agreement:
    def __init__(self):
        self.asked, self.agreed = [], asyncio.Event()

    async def agree(self, generation, places):
        self.asked.append((generation, places))
        await self.agreed.wait()
        return 7


def test_a_generation_that_follows_a_commit_is_held_back_too():
    """A new leader sends the newest commit to workers that have missed it, before it announces a generation."""

    async def run():
        agreement, delivered = Agreement(), []
        roster = SimpleNamespace(places=lambda: PLACES, deliver=delivered.extend)
        driver = Driver(SimpleNamespace(lease=HeldLease(), roster=roster), agreement)
        announcement = Announce(5, members=MEMBERS, committed=7, base=4)
        messages = [Send(A, Commit(4, 7, scale=1.0, norm=1.0, loss=1.0)), Send(A, announcement), Send(B, announcement)]
        driver.send(messages)
        adoption = Adopt(5, {}, None, [], None, stagger=False, shares=Shares([], [], True, [], None))
        driver.send([Send(A, adoption)])
        await asyncio.sleep(0.01)
        assert agreement.asked == [(5, PLACES)]
        assert delivered == messages, "no worker can start the generation"
        agreement.agreed.set()
        await asyncio.sleep(0.01)
        assert delivered[-1].message == msgspec.structs.replace(adoption, term=7), (
            "the message carries the term of the agreement"
        )

    asyncio.run(run())
