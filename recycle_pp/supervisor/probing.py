"""Checks whether this machine can reach the other nodes of the job, before a worker is restarted here.

prober = Prober(send, prints=launch.local_rank == 0)
prober.answer(probe, token)                             # probes in the background, then calls send(Probed([...]))
names = await unreachable(probe.targets, token)         # ["node1 (10.0.0.2:41234)"]
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence

from recycle_pp.wire.connection import connect
from recycle_pp.wire.launch import joined
from recycle_pp.wire.messages.handshake import CandidateHello
from recycle_pp.wire.messages.supervisors import Probe, Probed, Target

SECONDS = 3.0  # time limit for a connection; one lost packet delays a connection by 1 s, two lost packets by 3 s


class Prober:
    """Answers the coordinator's probes. prints: whether this rank prints which nodes cannot be reached."""

    def __init__(self, send: Callable[[Probed], None], prints: bool) -> None:
        self._send, self._prints = send, prints
        self._printed = ""
        self._probing: asyncio.Task[None] | None = None

    def answer(self, probe: Probe, token: str) -> None:
        self._probing = asyncio.create_task(self._answer(probe, token))

    async def _answer(self, probe: Probe, token: str) -> None:
        names = await unreachable(probe.targets, token)
        sentence = (
            f"this node cannot reach {' and '.join(names)}: its workers start once the network between them works"
        )
        if names and self._prints and sentence != self._printed:
            print(f"recycle_pp: {sentence}", file=sys.stderr, flush=True)
        self._printed = sentence
        self._send(Probed(names))


async def unreachable(targets: Sequence[Target], token: str) -> list[str]:
    """Descriptions of the targets to which no authenticated connection can be made."""
    reached = await asyncio.gather(*(_reaches(target, token) for target in targets))
    return [f"{of.name} ({joined(of.host, of.port)})" for of, yes in zip(targets, reached, strict=True) if not yes]


async def _reaches(target: Target, token: str) -> bool:
    try:
        (await connect(target.host, target.port, token, CandidateHello(), SECONDS)).close()
    except OSError:
        return False
    return True
