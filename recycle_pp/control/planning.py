"""Plans the coming steps in a thread: meanwhile the coordinator hears who is alive, who has voted and who dies.

planning = Planning(lambda: job, drive, stop)
planning.look()            # after every event: begins if the job wants a plan
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from typing import Any

from recycle_schedules import Problem

from ..protocol.job import Job


class Planning:
    """drive(event, *arguments): an event into the job, and a look; stop(reason): the planner has failed."""

    def __init__(self, job: Callable[[], Job], drive: Callable[..., Any], stop: Callable[[str], None]) -> None:
        self._job, self._drive, self._stop = job, drive, stop
        self._task: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        return self._task is not None

    def look(self) -> None:
        job = self._job()
        if not self.busy and job.wants_plan:
            self._task = asyncio.create_task(self._plan(job, job.problem_now()))

    async def _plan(self, job: Job, problem: Problem) -> None:
        try:
            steps = await asyncio.to_thread(job.steady.plan, problem)
            self._task = None
            if job is self._job():
                self._drive(job.planned, steps)  # which looks again: the membership may be another one by now
            else:
                self.look()
        except Exception:
            self._stop(f"the planner failed:\n{traceback.format_exc()}")
