"""Reports every few seconds what the start of a job waits for, until its first step is committed.

    await until_all_have_come(roster, world=12, say=recorder.say, stop=lifecycle.stop)      # supervisors
    await until_first_step(starting, say=recorder.say)                                      # workers

If supervisors are missing after `LIMIT` seconds, the job ends. `hang_detector.py` has the time limits of workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from itertools import groupby
from typing import NamedTuple, Protocol

SECONDS = 4.0  # between two lines
LOOK_SECONDS = 0.05
LIMIT = 600.0  # seconds to wait for supervisors; nodes of a cluster do not start together
GROUPS = 4  # a line shows at most this many groups of workers with the same activity


class Ranks(Protocol):
    """The connected ranks: a `Roster`."""

    @property
    def complete(self) -> bool: ...

    def __contains__(self, rank: int, /) -> bool: ...


class Starting(NamedTuple):
    """A worker before the first commit: its name such as "1.2", its rank, its host, and its activity in words."""

    worker: str
    rank: int
    host: str
    doing: str


async def until_all_have_come(
    roster: Ranks, world: int, say: Callable[[str], None], stop: Callable[[str], None]
) -> None:
    """Returns when all supervisors have connected once. Calls stop(reason) if some are missing after `LIMIT`."""
    loop = asyncio.get_running_loop()
    begun = due = loop.time()
    while not roster.complete:
        if loop.time() < due + SECONDS:
            await asyncio.sleep(LOOK_SECONDS)
            continue
        due += SECONDS
        missing = [number for number in range(world) if number not in roster]
        seconds = loop.time() - begun
        if missing and seconds >= LIMIT:
            stop(f"{in_words(missing)} did not connect within {LIMIT / 60:.0f} minutes; see the output of their nodes")
            return
        if missing:
            say(f"not connected after {seconds:.0f} s: {in_words(missing)}; see the output of their nodes")


async def until_first_step(starting: Callable[[], list[Starting] | None], say: Callable[[str], None]) -> None:
    """Returns when starting() is None, because the first step is committed. starting() returns an empty list while the
    workers are not known yet."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    while True:
        await asyncio.sleep(SECONDS)
        workers = starting()
        if workers is None:
            return
        say(f"{loop.time() - begun:.0f} s: {activities(workers) or 'workers are being started'}")


def activities(workers: Iterable[Starting]) -> str:
    """Groups of workers with the same activity, smallest first: "import torch: 1.2 (rank 6) on host3"."""
    groups: dict[tuple[str, str], list[Starting]] = {}
    for of in workers:
        groups.setdefault((of.doing, of.host), []).append(of)
    shown = sorted(groups.items(), key=lambda item: len(item[1]))
    texts = [
        f"{doing}: {_names([of.worker for of in those])} ({in_words([of.rank for of in those])}) on {host}"
        for (doing, host), those in shown[:GROUPS]
    ]
    rest = sum(len(those) for _, those in shown[GROUPS:])
    return "; ".join(texts + ([f"and {rest} other workers"] if rest else []))


def in_words(ranks: Collection[int]) -> str:
    """[4, 5, 6, 9] as "ranks 4 to 6 and 9"."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0])]
    texts = [f"{run[0]}" if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    text = " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"


def _names(workers: list[str]) -> str:
    return f"workers {', '.join(workers)}" if len(workers) < 7 else f"{len(workers)} workers"
