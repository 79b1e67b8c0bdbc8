"""A node joins a running job, and handles its answers and redirections. The test plays the job."""

import asyncio

import pytest

from recycle_pp.config.settings import Settings
from recycle_pp.wire import join as newcomer
from recycle_pp.wire.connection import serve
from recycle_pp.wire.launch import Address
from recycle_pp.wire.messages.agreement import Leader
from recycle_pp.wire.messages.handshake import SupervisorHello
from recycle_pp.wire.messages.supervisors import NoPlace, Redirect, SupervisorWelcome

TOKEN = "a token of the job"
ENVIRONMENT = {"RECYCLE_TOKEN": TOKEN}
HELLO = SupervisorHello(rank=0, host="here", pid=1)
WELCOME = SupervisorWelcome(Settings(), "runs/mine", Leader(0, 0, "127.0.0.1", 1), rank=4)


async def job(*answers):
    """(server, address) of a supervisor that gives each joining node the next answer."""
    left = list(answers)

    async def handler(peer):
        assert peer.hello.rank == -1, "a joining node has no rank"
        peer.send(left.pop(0))

    server = await serve(handler, "127.0.0.1", 0, TOKEN)
    return server, Address(*server.sockets[0].getsockname()[:2], TOKEN)


def test_a_command_line_without_join_starts_a_new_job():
    assert newcomer.find_place(["parallel=2x2", "run.dir=join=x"], ENVIRONMENT) is None
    assert newcomer.find_place(["+join=node0:29501"], ENVIRONMENT) == Address("node0", 29501, TOKEN)


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        (
            ["+join=node0"],
            ENVIRONMENT,
            "join must be HOST:PORT of the job's coordinator, or its run",
        ),
        (["+join=node0:65536"], ENVIRONMENT, "or its run folder, with a port from 1 to 65535, not 'node0:65536'"),
        (["+join=node0:1", "run.steps=3"], ENVIRONMENT, "a node that joins runs with the job.s settings"),
        (["+join=node0:1"], {}, "set RECYCLE_TOKEN on every node"),
    ],
)
def test_mistakes_are_reported_in_one_sentence(arguments, environment, expected):
    with pytest.raises(ValueError, match=expected):
        newcomer.find_place(arguments, environment)


def test_a_new_node_is_redirected_to_the_coordinator():
    async def main():
        coordinator, there = await job(WELCOME)
        other, here = await job(Redirect(Leader(3, 1, there.host, there.port)))
        async with coordinator, other:
            entered = await newcomer.enter(here, HELLO)
            assert (entered.welcome.rank, entered.address) == (4, there)
            entered.peer.close()

    asyncio.run(main())


def test_a_joining_node_retries_for_a_limited_time_while_there_is_no_coordinator(monkeypatch):
    monkeypatch.setattr(newcomer, "AGAIN", 0.01)
    monkeypatch.setattr(newcomer, "ANSWER_SECONDS", 0.3)
    nobody = Redirect(None)

    async def main():
        server, here = await job(nobody, nobody, WELCOME)
        async with server:
            assert (await newcomer.enter(here, HELLO)).welcome.rank == 4
        with pytest.raises(ValueError, match=f"no job answers at 127.0.0.1:{here.port}: "):
            await newcomer.enter(here, HELLO)

    asyncio.run(main())


def test_a_joining_node_does_not_wait_for_a_job_that_stays_silent(monkeypatch):
    monkeypatch.setattr(newcomer, "AGAIN", 0.01)
    monkeypatch.setattr(newcomer, "ANSWER_SECONDS", 0.3)

    async def main():
        server = await serve(lambda peer: asyncio.sleep(20), "127.0.0.1", 0, TOKEN)
        here = Address(*server.sockets[0].getsockname()[:2], TOKEN)
        with pytest.raises(ValueError, match=f"no job answers at 127.0.0.1:{here.port}: "):
            await asyncio.wait_for(newcomer.enter(here, HELLO), 10)
        server.close()

    asyncio.run(main())


def test_a_rejected_node_receives_the_reason():
    async def main():
        server, here = await job(NoPlace("start fewer", surplus=True), NoPlace("no place"))
        async with server:
            with pytest.raises(newcomer.Surplus, match="start fewer"):
                await newcomer.enter(here, HELLO)
            with pytest.raises(ValueError, match="no place"):
                await newcomer.enter(here, HELLO)
            with pytest.raises(ValueError, match="does not accept this RECYCLE_TOKEN"):
                await newcomer.enter(Address(here.host, here.port, "another token"), HELLO)

    asyncio.run(main())
