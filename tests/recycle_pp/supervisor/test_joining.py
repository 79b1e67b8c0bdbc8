"""How long a node waits for its first connection to the coordinator."""

import asyncio
import time

import pytest

from recycle_pp.supervisor import joining
from recycle_pp.supervisor.joining import FirstLauncher, find_coordinator
from recycle_pp.testing.ports import free_ports
from recycle_pp.wire.launch import Address, Launch
from recycle_pp.wire.messages.handshake import SupervisorHello

HELLO = SupervisorHello(1, "host", 1, 1)


def launch(port):
    return Launch(rank=1, world=2, local_world=1, master_port=port, agent=1, agents=2)


def test_a_node_exits_soon_after_the_launcher_of_rank_0(monkeypatch):
    """For example, a node takes a minute to import, and the start was rejected after half a minute."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    begun = time.monotonic()
    with pytest.raises(ValueError, match="launcher of rank 0's node exited before the job started; see its output"):
        asyncio.run(find_coordinator(launch(free_ports()), HELLO, Address("127.0.0.1", free_ports(), "x" * 16)))
    assert 2.0 <= time.monotonic() - begun < 10.0


async def find_within(seconds, launched):
    """Looks for a coordinator that does not listen, for `seconds` at most."""
    async with asyncio.timeout(seconds):
        await find_coordinator(launched, HELLO, Address("127.0.0.1", free_ports(), "x" * 16))


def test_a_node_waits_as_long_as_the_launcher_of_rank_0_runs(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(joining, "JOIN_SECONDS", 1.0)

    async def wait():
        async with await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1") as store:
            with pytest.raises(TimeoutError):
                await find_within(4.0, launch(store.sockets[0].getsockname()[1]))

    asyncio.run(wait())


def test_a_node_that_cannot_see_the_launcher_of_rank_0_waits_for_a_limited_time(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    monkeypatch.setattr(joining, "JOIN_SECONDS", 1.0)
    with pytest.raises(ConnectionRefusedError):
        asyncio.run(find_within(10.0, launch(free_ports())))


def test_one_refused_connection_does_not_prove_that_the_launcher_has_exited(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")

    async def look():
        first = FirstLauncher(launch(free_ports()))
        return [await first.has_ended() for _ in range(20)]

    assert not any(asyncio.run(look()))
