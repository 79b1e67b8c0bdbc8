"""Plans the next steps from measured durations, in a thread, so that the loop can handle votes and deaths.

planning = Planning(settings, run, planned, stop, lease)
speeds, problem = planning.measured(spans, job)     # after every commit
planning.look(job)                                  # after every event: starts a plan if the job wants one
await planning.load()                               # on a new coordinator
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
from recycle_schedules import Problem, Worker

from recycle_pp.config.settings import Settings
from recycle_pp.consensus.agreement import Deposed
from recycle_pp.consensus.leader_lease import LeaderLease
from recycle_pp.fitting.problem import memory_of
from recycle_pp.fitting.profile import Profile
from recycle_pp.fitting.slowness import Speed
from recycle_pp.protocol.job import Job
from recycle_pp.telemetry.background import in_time
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.wire.files import UnreadableFile, decode, read
from recycle_pp.wire.messages.generations import LinksMeasured
from recycle_pp.wire.messages.lifecycle import Ready
from recycle_pp.wire.records import Profile as Record


class Planning:
    """planned(problem): called when `job.steady` has planned the problem. stop(reason): the planner failed."""

    def __init__(
        self,
        settings: Settings,
        run: RunFolder,
        planned: Callable[[Problem], None],
        stop: Callable[[str], None],
        lease: LeaderLease,
    ) -> None:
        self._settings = settings
        self._run = run
        self._planned = planned
        self._stop = stop
        self._lease = lease
        self._profile = Profile(settings)
        self._task: asyncio.Task[None] | None = None
        self._prepared = -1  # the step in which a possible death was last planned

    @property
    def busy(self) -> bool:
        return self._task is not None

    def introduced(self, worker: Worker, message: Ready, problem: Problem) -> Problem:
        """Takes a worker's report about its stage and its machine. Returns the problem with the reported memory."""
        self._profile.describe(worker.stage, message.boundary_bytes, message.deferred_share, message.memory)
        self._profile.place(worker, message.machine, message.cores)
        measured = self._profile.memory
        if measured is None or problem.memory is not None:
            return problem
        return problem.replace(memory=memory_of(self._settings, measured))

    def links_measured(self, message: LinksMeasured) -> None:
        """Takes latencies and bandwidths that a worker has measured. The next plans use them."""
        self._profile.links.measured(message.machine, message.found)

    def probes(self, live: Collection[Worker]) -> Mapping[Worker, dict[str, Worker]]:
        """See LinkTable.wanted."""
        return self._profile.links.wanted(live)

    def profiled(self, worker: Worker, kind: str) -> float | None:
        """See Profile.seconds."""
        return self._profile.seconds(worker, kind)

    def measured(self, spans: Mapping[Worker, np.ndarray], job: Job) -> tuple[list[Speed], Problem]:
        """Takes the spans of a committed step. Returns the workers that became slow or recovered, and the job's problem
        with the measured durations and speeds."""
        was_complete = self._profile.complete
        changed = self._profile.add(spans, job.problem_now().recomputes)
        if self._profile.complete and not was_complete:
            self._run.later(self._run.write_json, self._run.profile, self._profile.to_json())
        return changed, self._profile.problem(job.problem)

    async def load(self) -> None:
        """Loads the durations that an earlier coordinator has measured, unless profile.json cannot be read on this
        machine or reading it takes too long (`in_time`)."""
        measured = await in_time(_read_profile, self._run.profile)
        if measured is not None and self._profile.fits(measured):
            self._profile.load(measured)

    def problem(self, problem: Problem) -> Problem:
        """The problem with the durations measured so far."""
        return self._profile.problem(problem)

    def look(self, job: Job) -> None:
        if not self.busy and job.wants_plan:
            self._task = asyncio.create_task(self._plan(job, job.problem_now()))
        elif not self.busy and job.committed > self._prepared and job.phase == "running":
            self._prepared = job.committed
            self._task = asyncio.create_task(self._plan_ahead(job))

    async def _plan_ahead(self, job: Job) -> None:
        """Plans for one of the possible next deaths and caches the plan, so that the death needs only a look-up."""
        try:
            for problem in job.steady.ahead():
                await asyncio.to_thread(job.steady.plan, problem)
                break
            self._task = None
            self.look(job)
        except Exception:
            self._stop(f"the planner failed:\n{traceback.format_exc()}")

    async def _plan(self, job: Job, problem: Problem) -> None:
        try:
            await asyncio.to_thread(job.steady.plan, problem)
            await self._lease.wait()
            self._task = None
            self._planned(problem)
        except Deposed:
            pass
        except Exception:
            self._stop(f"the planner failed:\n{traceback.format_exc()}")


def _read_profile(path: Path) -> Record | None:
    with suppress(FileNotFoundError, UnreadableFile):  # then this coordinator measures again
        return decode(path, read(path), Record)
    return None
