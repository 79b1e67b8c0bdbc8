"""Plans the coming steps in a thread: meanwhile the coordinator hears who is alive, who has voted and who dies.

planning = Planning(lambda: job, drive, stop)
planning.look()            # after every event: begins if the job wants a plan
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from typing import Any

from ..protocol.job import Job


class Planning:
    """drive(event, *arguments): an event into the job, and a look; stop(reason): the planner has failed."""

    def __init__(self, job: Callable[[], Job], drive: Callable[..., Any], stop: Callable[[str], None]) -> None:
        self._job, self._drive, self._stop = job, drive, stop
        self._task: asyncio.Task[None] | None = None

    def look(self) -> None:
        if self._task is None and self._job().wants_plan:
            self._task = asyncio.create_task(self._plan(self._job()))

    async def _plan(self, job: Job) -> None:
        try:
            steps = await asyncio.to_thread(job.steady.plan, job.problem_now())
        except Exception:
            self._stop(f"the planner failed:\n{traceback.format_exc()}")
            return
        self._task = None
        if job is self._job():
            self._drive(job.planned, steps)  # which looks again: the membership may be another one by now
        else:
            self.look()
