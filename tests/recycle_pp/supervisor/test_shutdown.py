"""How long a supervisor that got a signal waits for the coordinator's answer."""

import asyncio
import signal

import pytest

from recycle_pp.supervisor import shutdown
from recycle_pp.supervisor.shutdown import Shutdown
from recycle_pp.wire.messages.supervisors import Evict


@pytest.mark.parametrize("lost", [False, True])
def test_a_supervisor_waits_longer_for_the_answer_if_the_coordinator_is_lost(lost, monkeypatch):
    monkeypatch.setattr(shutdown, "ASK_SECONDS", 0.1)

    async def main():
        sent = []
        signalled = Shutdown(sent.append)
        signalled.signal.set_result(signal.SIGTERM)
        signalled.report()
        loop = asyncio.get_running_loop()
        serving = loop.create_future()
        loop.call_later(0.05, setattr, signalled, "lost", lost)
        loop.call_later(0.5, signalled.answer, Evict())
        assert await signalled.wait_for_answer(serving) == lost
        signalled.repeat_report()
        assert len(sent) == 2 and sent[0] == sent[1]

    asyncio.run(main())
