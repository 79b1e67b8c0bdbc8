"""Says every 10 s which ranks a job still waits for at its start, and ends it when they do not come.

await until_all_have_come(roster, world=12, say=recorder.say, stop=lifecycle.stop)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from itertools import groupby
from typing import Protocol

SECONDS = 10.0
LIMIT = 600.0  # seconds: nodes of a cluster do not start together


class Ranks(Protocol):
    """Those that have come: a `Roster`."""

    @property
    def complete(self) -> bool: ...

    def __contains__(self, rank: int, /) -> bool: ...


async def until_all_have_come(
    roster: Ranks, world: int, say: Callable[[str], None], stop: Callable[[str], None]
) -> None:
    """Returns when all supervisors have come once. stop(reason): some have not, in `LIMIT` seconds."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    while not roster.complete:
        await asyncio.sleep(SECONDS)
        missing = [number for number in range(world) if number not in roster]
        seconds = loop.time() - begun
        if missing and seconds >= LIMIT:
            stop(f"{in_words(missing)} did not come in {LIMIT / 60:.0f} minutes; their nodes' output says why")
            return
        if missing:
            say(f"waits for {in_words(missing)}: not there after {seconds:.0f} s; their nodes' output says why")


def in_words(ranks: Collection[int]) -> str:
    """[4, 5, 6, 9] as "ranks 4 to 6 and 9"."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0])]
    texts = [f"{run[0]}" if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    text = " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"
