"""Releases torchrun's exit barrier for agents that are dead: else the others wait for them five minutes at the end.

    await release(launch, lost=1)       # while this rank's own agent has not come to the barrier yet; a few seconds

torchrun's agents count themselves in a store that the first of them hosts (static rendezvous), and each waits until all
have come. Here the dead are counted in, by torch's own code in a process of its own, since supervisors do without
torch. Where the agent that hosted the store is lost nobody waits: the others' call fails, and they exit with 0.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import sys
from contextlib import suppress

from recycle_pp.wire.launch import Launch

SECONDS = 20.0  # for importing torch on a busy machine; then the agents wait as they would have
_STORE_SECONDS = 5.0  # for the store to answer


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
