"""Ends the other ranks of a launch that has no job to run. Rank 0 does this instead of starting a coordinator.

    asyncio.run(dismiss(launch, address, "the run is complete: ..."))
    asyncio.run(dismiss(launch, address, "run.steps must be at least 1, not 0", code=2, seconds=REFUSED_SECONDS))

Each rank connects to the coordinator's address, receives `Finish` with the exit code and the reason, and exits.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from recycle_pp.command import say
from recycle_pp.wire.connection import ChannelClosed, Peer, serve
from recycle_pp.wire.launch import Address, Launch, new_token, publish, withdraw
from recycle_pp.wire.messages.handshake import SupervisorHello
from recycle_pp.wire.messages.supervisors import FROM_SUPERVISOR, Finish

REFUSED_SECONDS = 20.0  # time for the other ranks to connect, if rank 0 rejects the configuration
LEAVE_SECONDS = 20.0  # time for a rank to disconnect after `Finish`


async def dismiss(
    launch: Launch, address: Address | None, sentence: str, code: int = 0, seconds: float | None = None
) -> None:
    """Sends `Finish` to every other rank. Returns when all of them have disconnected, or after `seconds`.

    address   address of the coordinator; None on one node
    sentence  the reason, for users
    code      exit code of the first rank of each other node
    seconds   time limit; None: ten minutes, as at a job's start

    Raises ValueError if rank 0 cannot listen at `address`.
    """
    if launch.world == 1:
        return
    from recycle_pp.coordinator.arrivals import wait_for_arrivals

    notified = Notified(launch.world)

    async def handle(peer: Peer) -> None:
        if not isinstance(peer.hello, SupervisorHello):
            return
        peer.send(Finish(code, sentence))
        with suppress(TimeoutError, ChannelClosed):  # the rank disconnects after reading `Finish`
            async with asyncio.timeout(LEAVE_SECONDS):
                while True:
                    await peer.recv(FROM_SUPERVISOR)
        notified.add(peer.hello.rank)

    at = address or Address("127.0.0.1", 0, new_token())
    try:
        server = await serve(handle, at.host, at.port, at.token, clients=launch.world)
    except OSError as error:
        raise ValueError(f"{sentence}; the other ranks cannot be notified: {at}: {error.strerror}") from None
    if launch.one_node:
        publish(launch, Address(at.host, server.sockets[0].getsockname()[1], at.token))
    missing = asyncio.create_task(wait_for_arrivals(notified, launch.world, _print))
    all_notified = asyncio.create_task(notified.all.wait())
    await asyncio.wait({missing, all_notified}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    if missing.done() and (reason := missing.result()):
        _print(reason)
    missing.cancel()
    withdraw(launch)
    server.close()


class Notified:
    """The ranks that have received `Finish`, and rank 0."""

    def __init__(self, world: int) -> None:
        self._ranks = {0}
        self._world = world
        self.all = asyncio.Event()

    def add(self, rank: int) -> None:
        self._ranks.add(rank)
        if self.complete:
            self.all.set()

    @property
    def complete(self) -> bool:
        return self._ranks >= set(range(self._world))

    def __contains__(self, rank: int) -> bool:
        return rank in self._ranks


def _print(sentence: str) -> None:
    say(f"recycle_pp: {sentence}")
