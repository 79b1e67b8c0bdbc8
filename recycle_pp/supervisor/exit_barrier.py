"""Lets torchrun's agents end with the job: else they would wait in torch's exit barrier, for minutes, for lost nodes.

    limit_wait(launch)                  # the first rank of each node, at its end: for a store that does not answer
    await release(launch, lost=1)       # the coordinator's rank, at its end: for agents that are lost; takes seconds

At its end each agent registers itself in a store that the agent of node 0 hosts (static rendezvous), and waits until
all agents have. Two cases would hold it up:

- An agent is lost. `release` registers it, by torch's own code in a process of its own, as supervisors do not import
  torch.
- Node 0 is lost, so the store does not answer. Connections to a dead process are reset, and the agents exit with 0 at
  once. To a machine behind a cut link TCP would repeat its packets for a quarter of an hour: `limit_wait` lets the
  agent's connection break after `SILENT_SECONDS`.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import socket
import sys
from contextlib import suppress

from recycle_pp.wire.keepalive import set_keepalive
from recycle_pp.wire.launch import Launch

from .foreign_sockets import connections_to

SECONDS = 20.0  # for importing torch on a busy machine; then the agents wait as they would have
SILENT_SECONDS = 8.0  # without an answer of the store's machine
_STORE_SECONDS = 5.0  # for the store to answer
_CONNECT_SECONDS = 2.0  # for its machine, when only that is asked


def limit_wait(launch: Launch) -> None:
    """Lets the agent's connection to the store break `SILENT_SECONDS` after its machine stops answering.

    Prints a sentence if the kernel does not permit that and the machine does not answer.
    """
    if launch.agents == 1:
        return
    try:
        for sock in connections_to(os.getppid(), launch.master_port):
            with sock, suppress(OSError):  # the connection has broken
                set_keepalive(sock, SILENT_SECONDS)
    except ProcessLookupError:  # the agent has ended
        pass
    except PermissionError:
        place = launch.master_address, launch.master_port
        try:
            socket.create_connection(place, _CONNECT_SECONDS).close()
        except TimeoutError:
            print(
                f"recycle_pp: the job is done, but torchrun may wait up to 16 minutes for node 0: {place[0]} does not "
                "answer, and the kernel lets only root, or every process with kernel.yama.ptrace_scope=0, end that "
                "wait; kill -9 it if you do not want to wait",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        except OSError:  # it answers
            pass


async def release(launch: Launch, lost: int) -> None:
    command = [sys.executable, "-m", "recycle_pp.supervisor.exit_barrier", str(launch.agents), str(lost)]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), SECONDS)
    if process.returncode is None:
        process.kill()
        await process.wait()


def main(agents: int, lost: int) -> None:
    from torch.distributed import PrefixStore, TCPStore
    from torch.distributed.elastic.agent.server.api import _TERMINAL_STATE_SYNC_ID
    from torch.distributed.elastic.utils.store import _barrier_nonblocking

    place, timeout = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), datetime.timedelta(0, _STORE_SECONDS)
    store = TCPStore(*place, is_master=False, timeout=timeout, wait_for_workers=False)
    for _ in range(lost):
        _barrier_nonblocking(PrefixStore(os.environ["TORCHELASTIC_RUN_ID"], store), agents, _TERMINAL_STATE_SYNC_ID)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
