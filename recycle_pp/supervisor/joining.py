"""How a supervisor gets its first connection to the coordinator, which may not listen yet.

    peer, address = await find_coordinator(launch, hello, address=None)      # of this node, by its private file
    peer, address = await find_coordinator(launch, hello, Address(...))      # of another node
    why(error)                                                               # an OSError of it in words

A node whose launcher shares a store with that of rank 0's node ends as soon as that launcher has ended: the start was
refused there.

Nodes of a cluster do not start together: every 4 s the node's first rank says for whom it waits, and why. For whom the
coordinator itself waits says `coordinator.arrivals`. On one node rank 0 speaks, unless no launcher is known to have
started it: then every rank does.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time

from recycle_pp.consensus.refusal import Refusal
from recycle_pp.wire.connection import Peer, connect
from recycle_pp.wire.launch import Address, Launch, find
from recycle_pp.wire.messages.handshake import SupervisorHello

JOIN_SECONDS = 600.0  # for the coordinator to appear
SAY_SECONDS = 4.0  # between two lines of a node that waits
LOOK_SECONDS = 0.5  # between two checks of rank 0's launcher


async def find_coordinator(launch: Launch, hello: SupervisorHello, address: Address | None) -> tuple[Peer, Address]:
    """A connection on which `hello` was accepted, and where it leads; tries for `JOIN_SECONDS`.

    address: None where all ranks are on one node: the coordinator publishes its address in a private file there.

    Raises:
        OSError: no coordinator in `JOIN_SECONDS`.
        ValueError: the coordinator refuses the hello, or rank 0's launcher has ended; with the reason.
    """
    loop = asyncio.get_running_loop()
    deadline, waiting, first = loop.time() + JOIN_SECONDS, Waiting(launch), FirstLauncher(launch)
    while True:
        place = address or find(launch)
        error: OSError = TimeoutError("rank 0 did not say where it is")
        if place is not None:
            try:
                return await connect(place.host, place.port, place.token, hello), place
            except OSError as failure:
                error = failure
        if isinstance(error, ConnectionRefusedError) and await first.has_ended():
            raise ValueError("the launcher of rank 0's node has ended before the job began; its output says why")
        waiting.say(f"{place.host}:{place.port}" if place is not None else "", error)
        if loop.time() > deadline:
            raise error
        await asyncio.sleep(0.02 if address is None else 0.2)


class FirstLauncher:
    """torchrun's agent on rank 0's node, seen from another node.

    With static rendezvous this agent hosts the store where all agents meet before any rank starts. A store that refuses
    connections later has ended, and its agent with it.
    """

    def __init__(self, launch: Launch) -> None:
        shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # else no store listens on the port
        self._at = (launch.master_address, launch.master_port) if shared and not launch.one_node else None
        self._refusal, self._due = Refusal(), 0.0

    async def has_ended(self) -> bool:
        """True once connections were refused for two seconds. Cheap: looks once in `LOOK_SECONDS`."""
        now = asyncio.get_running_loop().time()
        if self._at is None or now < self._due:
            return False
        self._due = now + LOOK_SECONDS
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                _, writer = await asyncio.open_connection(*self._at)
        except ConnectionRefusedError:
            return self._refusal.lasts("")
        except OSError:  # an unreachable network proves nothing
            return False
        writer.close()
        self._refusal.over()
        return False


class Waiting:
    """The lines of one node that waits; `say` may be called as often as the coordinator was tried."""

    def __init__(self, launch: Launch) -> None:
        self._launch, self._begun = launch, time.monotonic()
        self._said = self._begun

    def say(self, where: str, error: OSError) -> None:
        """Prints, now and then. where: HOST:PORT of the coordinator; error: of the last try to reach it."""
        now = time.monotonic()
        rank_0_speaks = self._launch.one_node and "TORCHELASTIC_RUN_ID" in os.environ
        if rank_0_speaks or now < self._said + SAY_SECONDS:
            return
        self._said = now
        if self._launch.one_node:
            print(
                f"recycle_pp: rank {self._launch.rank} has waited {now - self._begun:.0f} s for rank 0 of this machine",
                file=sys.stderr, flush=True,
            )  # fmt: skip
            return
        if self._launch.local_rank > 0:
            return
        node = f"node {self._launch.agent} ({socket.gethostname()})"
        print(
            f"recycle_pp: {node} has waited {now - self._begun:.0f} s for rank 0's node at {where}: {why(error)}",
            file=sys.stderr, flush=True,
        )  # fmt: skip


def why(error: OSError) -> str:
    """Why the coordinator cannot be reached, and what to look at."""
    match error:
        case ConnectionRefusedError():
            return "nothing listens there: that node is not ready yet, or has ended, or this is a wrong address"
        case socket.gaierror():
            return f"this host name cannot be resolved ({error.strerror})"
        case TimeoutError():
            return "no answer: a wrong address, a firewall in between, or another program listens there"
        case _:
            return error.strerror or str(error)
