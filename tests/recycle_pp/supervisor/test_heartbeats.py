"""When a supervisor breaks its connection to a coordinator that does not answer."""

import asyncio
from types import SimpleNamespace

from recycle_pp.config.settings import Control, Settings
from recycle_pp.supervisor import heartbeats as module
from recycle_pp.supervisor.heartbeats import Heartbeats


class Peer:
    def __init__(self):
        self.aborted = False

    def send(self, message):
        pass

    def abort(self):
        self.aborted = True


async def beats(heartbeats, seconds):
    """Sends heartbeats to a coordinator that answers none. Returns whether the connection was broken."""
    peer = Peer()
    sending = asyncio.create_task(heartbeats.send(peer))
    await asyncio.sleep(seconds)
    sending.cancel()
    return peer.aborted


def test_a_silent_coordinator_is_given_up_and_its_successor_gets_the_same_time_limit(monkeypatch):
    monkeypatch.setattr(module, "PLANNING", 0.0)

    async def main():
        heartbeats = Heartbeats(SimpleNamespace(rank=3, local_rank=0), SimpleNamespace(signs=lambda seconds: None))
        heartbeats.begin(Settings(control=Control(heartbeat=0.05, suspicion=1.0)))
        heartbeats._standby = None
        assert await beats(heartbeats, 2.0)
        assert not await beats(heartbeats, 0.3)
        heartbeats.close()

    asyncio.run(main())
