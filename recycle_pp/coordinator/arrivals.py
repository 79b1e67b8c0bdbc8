"""Reports the progress of a job's start every few seconds, until its first step is committed.

    error = await wait_for_arrivals(roster, world=12, say=recorder.say)      # reports which supervisors are missing
    await until_first_step(state, hangs)                                     # reports what the workers do

`hang_detector.py` ends workers that take too long to start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .hang_detector import HangDetector
    from .ranks import Rank
    from .state import JobState

SECONDS = 4.0  # between two reports
LOOK_SECONDS = 0.05  # between two checks for new connections
LIMIT = 600.0  # seconds to wait for supervisors; nodes of a cluster do not start together
GROUPS = 4  # a line shows at most this many groups of workers with the same activity


class Ranks(Protocol):
    """The part of `Roster` used here."""

    @property
    def complete(self) -> bool: ...

    def __contains__(self, rank: int, /) -> bool: ...


async def wait_for_arrivals(roster: Ranks, world: int, say: Callable[[str], None]) -> str | None:
    """Waits until all supervisors have connected once. Returns None, or an error message after `LIMIT`."""
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
            return f"{in_words(missing)} did not connect within {LIMIT / 60:.0f} minutes; see the output of their nodes"
        if missing:
            say(f"not connected after {seconds:.0f} s: {in_words(missing)}; see the output of their nodes")
    return None


async def until_first_step(state: JobState, hangs: HangDetector) -> None:
    """Reports the activity of starting workers, until the first step is committed or the job is over."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    while True:
        await asyncio.sleep(SECONDS)
        job = state.job
        if state.lifecycle.over or job.committed >= job.first_step:
            return
        awaited = [rank for rank in state.roster if rank.alive and (job.started or rank.number not in job.live)]
        doing = _activities(awaited, hangs)
        state.recorder.say(f"{loop.time() - begun:.0f} s: {doing or 'workers are being started'}")


def _activities(ranks: Iterable[Rank], hangs: HangDetector) -> str:
    """Text that lists groups of workers with the same activity on the same host, smallest group first."""
    groups: dict[tuple[str, str], list[Rank]] = {}
    for rank in ranks:
        groups.setdefault((hangs.start_in_words(rank), rank.host or "?"), []).append(rank)
    shown = sorted(groups.items(), key=lambda item: len(item[1]))
    texts = [
        f"{doing}: {_names([str(rank.role) for rank in those])} ({in_words([rank.number for rank in those])}) on {host}"
        for (doing, host), those in shown[:GROUPS]
    ]
    rest = sum(len(those) for _, those in shown[GROUPS:])
    return "; ".join(texts + ([f"and {rest} other workers"] if rest else []))


def in_words(ranks: Collection[int]) -> str:
    """Ranks in words: [4, 5, 6, 9] is "ranks 4 to 6 and 9"."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0])]
    texts = [f"{run[0]}" if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    text = " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"


def _names(workers: list[str]) -> str:
    return f"workers {', '.join(workers)}" if len(workers) < 7 else f"{len(workers)} workers"
