"""Prevents torchrun's agents from waiting minutes for lost nodes in torch's exit barrier.

    limit_wait(launch)                  # on the first rank of each node, before it exits
    await release(launch, lost=1)       # on the coordinator's rank, before it exits, if agents are lost; takes seconds

Before it exits, each agent registers in a store hosted by the agent of node 0 (static rendezvous) and waits until all
agents have registered. Two cases would delay the exit:

- An agent is lost. `release` registers the lost agent with torch's own code, in a separate process because supervisors
  do not import torch.
- Node 0 is lost, so the store does not answer. If only the process is dead, connections are reset and the agents exit
  with 0 at once. If the link is cut, TCP would retransmit for a quarter of an hour; `limit_wait` makes the agent's
  connection fail after `SILENT_SECONDS`.
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

SECONDS = 20.0  # time limit of `release`, which imports torch; if it is exceeded, the agents wait as without `release`
SILENT_SECONDS = 8.0  # time without a packet from the store's machine after which the connection fails
_STORE_SECONDS = 5.0  # time for the store to answer
_CONNECT_SECONDS = 2.0  # time for the store's machine to answer


def limit_wait(launch: Launch) -> None:
    """Makes the agent's connection to the store fail `SILENT_SECONDS` after the store's machine stops answering.

    If the kernel does not permit that and the machine does not answer, prints how long torchrun may wait.
    """
    if launch.agents == 1:
        return
    try:
        for sock in connections_to(os.getppid(), launch.master_port):
            with sock, suppress(OSError):  # the connection is broken already
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
                "answer. kill -9 ends torchrun now; a job run as root or with kernel.yama.ptrace_scope=0 does not wait",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        except OSError:  # the machine answered, for instance with a refusal
            pass


async def release(launch: Launch, lost: int) -> None:
    """Registers `lost` agents, unless the store's machine does not answer. A registered agent may still be alive, for
    instance if only one of its ranks was suspended. It then passes the barrier without waiting."""
    if launch.agents == 1 or not lost or not await _answers(launch):
        return
    command = [sys.executable, "-m", "recycle_pp.supervisor.exit_barrier", str(launch.agents), str(lost)]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), SECONDS)
    if process.returncode is None:
        process.kill()
        await process.wait()


async def _answers(launch: Launch) -> bool:
    try:
        connection = asyncio.open_connection(launch.master_address, launch.master_port)
        _, writer = await asyncio.wait_for(connection, _CONNECT_SECONDS)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def main(agents: int, lost: int) -> None:
    from torch.distributed import PrefixStore, TCPStore
    from torch.distributed.elastic.agent.server.api import _TERMINAL_STATE_SYNC_ID
    from torch.distributed.elastic.utils.store import _barrier_nonblocking

    place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    timeout = datetime.timedelta(0, _STORE_SECONDS)
    store = TCPStore(*place, is_master=False, timeout=timeout, wait_for_workers=False)
    for _ in range(lost):
        _barrier_nonblocking(PrefixStore(os.environ["TORCHELASTIC_RUN_ID"], store), agents, _TERMINAL_STATE_SYNC_ID)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
