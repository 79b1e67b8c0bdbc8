"""Plans the next steps in a thread, so that the event loop can handle votes and deaths meanwhile.

planning = Planning(state, driver)          # a handler: after an event, starts a plan if the job wants one
planning.busy                               # whether a plan is being made
planning.prepare(problem)                   # plans a problem that is expected soon, when the planner is idle
await load(profile, run.profile)            # loads the durations that an earlier coordinator measured
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from recycle_schedules import Problem

from recycle_pp.fitting.profile import Profile
from recycle_pp.protocol.events import Event, Outcome, PlanMade
from recycle_pp.protocol.job import Job
from recycle_pp.telemetry.background import in_time
from recycle_pp.wire.files import UnreadableFile, decode, read
from recycle_pp.wire.records import Profile as Record

from .driver import Driver
from .state import JobState


class Planning:
    def __init__(self, state: JobState, driver: Driver) -> None:
        self._state = state
        self._driver = driver
        self._task: asyncio.Task[None] | None = None
        self._prepared = -1  # newest committed step after which a plan for a possible death was made
        self._expected: Problem | None = None  # problem of `prepare` that is not planned yet

    @property
    def busy(self) -> bool:
        return self._task is not None

    def handled(self, event: Event, outcome: Outcome) -> None:
        self._look()

    def prepare(self, problem: Problem) -> None:
        """Plans this problem and caches the plan, so that it is ready when the job needs it."""
        self._expected = problem
        self._look()

    def _look(self) -> None:
        job = self._state.job
        if self.busy:
            return
        if job.wants_plan:
            self._start(self._plan, job, job.problem_now())
        elif self._expected is not None:
            problem, self._expected = self._expected, None
            self._start(self._plan_ahead, job, [problem])
        elif job.committed > self._prepared and job.phase == "running":
            self._prepared = job.committed
            self._start(self._plan_ahead, job, job.steady.ahead())

    def _start(self, work: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        self._task = asyncio.create_task(self._state.lifecycle.guard(work, *arguments, part="the planner"))

    async def _plan_ahead(self, job: Job, problems: Iterable[Problem]) -> None:
        """Plans the first of these problems and caches the plan. After the expected death, the plan only has to be
        looked up."""

        def plan_first() -> None:  # in the thread, because the search for a problem without a plan may take long
            for problem in problems:
                job.steady.plan(problem)
                break

        await asyncio.to_thread(plan_first)
        self._task = None
        self._look()

    async def _plan(self, job: Job, problem: Problem) -> None:
        await asyncio.to_thread(job.steady.plan, problem)
        await self._state.lease.wait()
        self._task = None
        self._driver.drive(PlanMade(problem))


async def load(profile: Profile, path: Path) -> None:
    """Loads the durations that an earlier coordinator measured. Does nothing if the file is unreadable, takes too
    long to read (`in_time`), or does not fit the job."""
    measured = await in_time(_read, path)
    if measured is not None and profile.fits(measured):
        profile.load(measured)


def _read(path: Path) -> Record | None:
    with suppress(FileNotFoundError, UnreadableFile):  # without the file, this coordinator measures again
        return decode(path, read(path), Record)
    return None
