"""A supervisor for tests: a rank on a different node from the coordinator, with the fake worker.

python fake_rank.py PORT TOKEN LOCAL_RANK
"""

import asyncio
import sys

from recycle_pp.supervisor.supervisor import Supervisor
from recycle_pp.wire.launch import Address, Launch


async def main(port: str, token: str, local_rank: str) -> int:
    launch = Launch(rank=5, world=6, local_rank=int(local_rank), local_world=2)
    supervisor = Supervisor(launch, module="fake_worker")
    try:
        return (await supervisor.run(Address("127.0.0.1", int(port), token))).code
    finally:
        supervisor.close()


sys.exit(asyncio.run(main(*sys.argv[1:])))
