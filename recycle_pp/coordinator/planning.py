"""Plans the coming steps with what the workers measure. In a thread: the coordinator hears votes and deaths meanwhile.

planning = Planning(settings, run, lambda: job, drive, stop)
for speed in planning.measured(spans): ...     # after every commit: who has become slow, or is so no more
planning.look()                                # after every event: begins if the job wants a plan
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from recycle_schedules import Problem, Worker

from recycle_pp.config.settings import Settings
from recycle_pp.consensus.agreement import Deposed
from recycle_pp.consensus.leader_lease import LeaderLease
from recycle_pp.protocol.job import Job
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.wire.messages.workers import LinksMeasured, Ready

from .problem import memory_of
from .profile import Profile
from .slowness import Speed


class Planning:
    """drive(event, *arguments): an event into the job, and a look; stop(reason): the planner has failed."""

    def __init__(
        self,
        settings: Settings,
        run: RunFolder,
        job: Callable[[], Job],
        drive: Callable[..., Any],
        stop: Callable[[str], None],
        lease: LeaderLease,
    ) -> None:
        self._settings, self._run, self._job, self._drive, self._stop = settings, run, job, drive, stop
        self._lease = lease
        self._profile = Profile(settings)
        self._task: asyncio.Task[None] | None = None
        self._prepared = -1  # the step in which it last planned for a death that may come

    @property
    def busy(self) -> bool:
        return self._task is not None

    def introduced(self, worker: Worker, message: Ready) -> None:
        """A worker is ready: what its stage sends and takes, and where it runs."""
        self._profile.describe(worker.stage, message.boundary_bytes, message.deferred_share, message.memory)
        self._profile.place(worker, message.machine, message.cores)
        job, measured = self._job(), self._profile.memory
        if measured is not None and job.problem.memory is None:
            job.replan(job.problem.replace(memory=memory_of(self._settings, measured)))

    def links_measured(self, message: LinksMeasured) -> None:
        """Latencies and bandwidths that a worker has measured; the plans from now on are made with them."""
        self._profile.links.measured(message.machine, message.found)

    def probes(self, live: Collection[Worker]) -> Mapping[Worker, dict[str, Worker]]:
        """See LinkTable.wanted."""
        return self._profile.links.wanted(live)

    def profiled(self, worker: Worker, kind: str) -> float | None:
        """See Profile.seconds."""
        return self._profile.seconds(worker, kind)

    def measured(self, spans: Mapping[Worker, np.ndarray]) -> list[Speed]:
        """The spans of a committed step. Where durations or speeds are other ones now, the coming steps are planned
        anew; returns who has become slow, or is so no more."""
        was_complete = self._profile.complete
        changed = self._profile.add(spans, self._job().problem_now().recomputes)
        if self._profile.complete and not was_complete:
            self._run.later(self._run.write_json, self._run.profile, self._profile.to_json())
        self.follow_profile()
        return changed

    def take_up(self, measured: Mapping[str, Any] | None) -> None:
        """What the coordinator before this one has measured: its profile.json, if it is on this machine."""
        if measured is not None and self._profile.fits(measured):
            self._profile.take_up(measured)
        self.follow_profile()

    def follow_profile(self) -> None:
        """The job's problem gets the measured times, where they are other ones."""
        job = self._job()
        problem = self._profile.problem(job.problem)
        if problem != job.problem:
            job.replan(problem)
            self.look()

    def look(self) -> None:
        job = self._job()
        if not self.busy and job.wants_plan:
            self._task = asyncio.create_task(self._plan(job, job.problem_now()))
        elif not self.busy and job.committed > self._prepared and job.phase == "running":
            self._prepared = job.committed
            self._task = asyncio.create_task(self._plan_ahead(job))

    async def _plan_ahead(self, job: Job) -> None:
        """Plans for one of the deaths that may come next, and keeps the plan: a death then costs a look-up."""
        try:
            for problem in job.steady.ahead():
                await asyncio.to_thread(job.steady.plan, problem)
                break
            self._task = None
            self.look()
        except Exception:
            self._stop(f"the planner failed:\n{traceback.format_exc()}")

    async def _plan(self, job: Job, problem: Problem) -> None:
        try:
            steps = await asyncio.to_thread(job.steady.plan, problem)
            await self._lease.wait()
            self._task = None
            if job is self._job():
                self._drive(job.planned, steps)  # which looks again: the membership may be another one by now
            else:
                self.look()
        except Deposed:
            pass
        except Exception:
            self._stop(f"the planner failed:\n{traceback.format_exc()}")
