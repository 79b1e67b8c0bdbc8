"""Checks, before a worker is restarted here, whether this machine can reach the other nodes of the job.

names = await unreachable(probe.targets, token)         # ["node1 (10.0.0.2:41234)"]
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from recycle_pp.wire.connection import connect
from recycle_pp.wire.messages.handshake import CandidateHello
from recycle_pp.wire.messages.supervisors import Target

SECONDS = 3.0  # for a connection: a lost packet delays it by one second, two by three


async def unreachable(targets: Sequence[Target], token: str) -> list[str]:
    """Descriptions of the targets to which no authenticated connection can be made."""
    reached = await asyncio.gather(*(_reaches(target, token) for target in targets))
    return [f"{of.name} ({of.host}:{of.port})" for of, yes in zip(targets, reached, strict=True) if not yes]


async def _reaches(target: Target, token: str) -> bool:
    try:
        (await connect(target.host, target.port, token, CandidateHello(), SECONDS)).close()
    except OSError:
        return False
    return True
