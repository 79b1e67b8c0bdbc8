"""Connects a supervisor to the coordinator for the first time. The coordinator may not be listening yet.

    peer, address = await find_coordinator(launch, hello, address=None)      # on this node, through its private file
    peer, address = await find_coordinator(launch, hello, Address(...))      # on another node
    explain(error)                                # for users: why `find_coordinator` raised this OSError

If the launcher of rank 0's node exits, rank 0 has rejected the start. A node that uses the store of this launcher
notices the exit and exits too.

Nodes of a cluster do not start together. Every 4 s the first rank of a waiting node prints what it waits for and why.
`coordinator.arrivals` prints which ranks the coordinator waits for. On one node only rank 0 prints; if the ranks were
started without a known launcher, each rank prints.
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

JOIN_SECONDS = 600.0  # time for the coordinator to appear
REPORT_SECONDS = 4.0  # seconds between two lines of a waiting node
LOOK_SECONDS = 0.5  # seconds between two checks for whether rank 0's launcher has exited


async def find_coordinator(launch: Launch, hello: SupervisorHello, address: Address | None) -> tuple[Peer, Address]:
    """A connection on which the coordinator has accepted `hello`, and the coordinator's address.

    Retries for `JOIN_SECONDS`. While rank 0's launcher is known to be running, retries without a limit, because rank 0
    may need hours to copy data from a store.

    address: None if all ranks are on one node, where the coordinator publishes its address in a private file.

    Raises:
        OSError: no coordinator answered within `JOIN_SECONDS`.
        ValueError: the coordinator rejected the hello, or rank 0's launcher has exited. The message names the reason.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + JOIN_SECONDS
    waiting = Waiting(launch)
    first = FirstLauncher(launch)
    while True:
        place = address or find(launch)
        error: OSError = TimeoutError("rank 0 has not published its address")
        if place is not None:
            try:
                return await connect(place.host, place.port, place.token, hello), place
            except OSError as failure:
                error = failure
        if isinstance(error, ConnectionRefusedError) and await first.has_ended():
            raise ValueError("the launcher of rank 0's node exited before the job started; see its output")
        if first.runs and (launch.one_node or isinstance(error, ConnectionRefusedError)):
            deadline = loop.time() + JOIN_SECONDS
        waiting.report(str(place) if place is not None else "", error)
        if loop.time() > deadline:
            raise error
        await asyncio.sleep(0.02 if address is None else 0.2)


class FirstLauncher:
    """torchrun's agent on rank 0's node, seen from another node.

    With static rendezvous this agent hosts the store where all agents meet before any rank starts. If that store
    refuses connections later, the agent has exited.
    """

    def __init__(self, launch: Launch) -> None:
        shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # otherwise no store listens on the port
        self._at = (launch.master_address, launch.master_port) if shared and not launch.one_node else None
        self._refusal = Refusal()
        self._due = 0.0
        # Whether the agent is known to run. On one node this never changes, because torchrun ends all ranks together
        # with rank 0. On several nodes, it is the result of the last check.
        self.runs = launch.one_node and "TORCHELASTIC_RUN_ID" in os.environ

    async def has_ended(self) -> bool:
        """Whether the agent has exited: True after two seconds of refused connections. Connects at most once every
        `LOOK_SECONDS`."""
        now = asyncio.get_running_loop().time()
        if self._at is None or now < self._due:
            return False
        self._due = now + LOOK_SECONDS
        self.runs = False
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                _, writer = await asyncio.open_connection(*self._at)
        except ConnectionRefusedError:
            return self._refusal.lasts("")
        except OSError:  # an unreachable network proves nothing
            return False
        writer.close()
        self.runs = True
        self._refusal.reset()
        return False


class Waiting:
    """Status lines of a waiting node. `report` may be called after every attempt."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._begun = time.monotonic()
        self._reported = self._begun

    def report(self, where: str, error: OSError) -> None:
        """Prints a line, at most once every `REPORT_SECONDS`.

        where: HOST:PORT of the coordinator; "" if unknown
        error: error of the last attempt to connect
        """
        now = time.monotonic()
        rank_0_reports = self._launch.one_node and "TORCHELASTIC_RUN_ID" in os.environ
        if rank_0_reports or now < self._reported + REPORT_SECONDS:
            return
        self._reported = now
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
            f"recycle_pp: {node} has waited {now - self._begun:.0f} s for rank 0's node at {where}: {explain(error)}",
            file=sys.stderr, flush=True,
        )  # fmt: skip


def explain(error: OSError) -> str:
    """The likely reason why the coordinator cannot be reached, for users. error: the failure to connect."""
    match error:
        case ConnectionRefusedError():
            return "nothing listens there: that node is not ready yet or has ended, or the address is wrong"
        case socket.gaierror():
            return f"this host name cannot be resolved ({error.strerror})"
        case TimeoutError():
            return "no answer: the address is wrong, a firewall drops the packets, or another program listens there"
        case _:
            return error.strerror or str(error)
