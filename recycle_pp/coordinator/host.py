"""Runs the coordinator in the event loop of the leading supervisor.

host = Host(settings, run, agreement, leader, token, job_id)              # the first coordinator of a job
host = Host(settings, run, agreement, leader, token, job_id, takeover)    # the successor of a lost coordinator
await host.handle(peer)                                                   # serves a connection until it ends
code = await host.ended
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import sys
import traceback

from recycle_pp.config.settings import Settings
from recycle_pp.consensus.agreement import PLANNING, Agreement, Leader
from recycle_pp.fitting.footprint import footprint
from recycle_pp.fitting.understudy_policy import why_none
from recycle_pp.telemetry.background import BackgroundStream, in_thread
from recycle_pp.telemetry.event_log import EventLog
from recycle_pp.telemetry.exporters.processes import Exporters
from recycle_pp.telemetry.guard import guarded, guarded_returning
from recycle_pp.telemetry.heartbeat import SECONDS, Heartbeat
from recycle_pp.telemetry.progress import Progress
from recycle_pp.telemetry.report import report
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.wire.connection import Peer
from recycle_pp.wire.launch import joined
from recycle_pp.wire.messages.agreement import Takeover

from .checkpoints import NOTHING, Whole
from .coordinator import WRITE_SECONDS, Coordinator

# Heartbeats at which to call gc.freeze(). Otherwise each garbage collection would scan the 200,000 objects of imports
# and the planner, which are never freed, and would block the loop for 50 ms.
FREEZES = (0, 10, 60)
# Time for an election and the start of the next coordinator, after `control.suspicion` + PLANNING seconds of silence
TAKEOVER_SECONDS = 10.0
SCREEN_SECONDS = 2.0  # longest wait at the end of the job for the console to print the last lines
# Seconds until the planner's thread must release the GIL. The loop releases the GIL for each message, so with Python's
# default of 5 ms, announcing a death to 128 workers took 100 ms (bench/loop.py).
SWITCH_SECONDS = 0.0001


class Host:
    def __init__(
        self,
        settings: Settings,
        run: RunFolder,
        agreement: Agreement,
        leader: Leader,
        token: str,
        job_id: str,
        takeover: Takeover | None = None,
        whole: Whole = NOTHING,
    ) -> None:
        """whole: the checkpoint to start from."""
        sys.setswitchinterval(SWITCH_SECONDS)
        self._screen = BackgroundStream(sys.stdout)
        world = settings.parallel.pipelines * settings.parallel.stages
        progress = self._progress = Progress(settings.run.steps, world, self._screen)
        if takeover is None:
            progress.say(f"{world} {'worker starts' if world == 1 else 'workers start'}; run folder {run.path}")
            for line in footprint(settings, int(os.environ.get("LOCAL_WORLD_SIZE", world))):
                progress.say(line)
            if store := settings.checkpoint.store:
                progress.say(
                    f"checkpoints are written to this folder, then uploaded to {store}; if a node is lost before its "
                    "upload is complete, the checkpoint is lost too, unless the other nodes share the folder"
                )
            if no_understudy := why_none(settings):
                progress.say(no_understudy)
        run.later(guarded(run.take_over), settings)
        self._run = run
        self._events = EventLog(run.events, settings.run.steps, progress.say, run.later, self._term)
        self._exporters = Exporters(settings, run)
        self._heartbeat = Heartbeat(run, self._term, joined(leader.host, leader.port), job_id)
        self._coordinator = Coordinator(
            settings, run, self._events, progress, agreement, leader, whole, takeover, token, job_id
        )
        self._state = self._coordinator.state
        self.ended = asyncio.create_task(self._coordinate())
        self._beating = asyncio.create_task(self._beat())

    async def handle(self, peer: Peer) -> None:
        await self._coordinator.handle(peer)

    def stop(self, reason: str, code: int) -> None:
        self._state.lifecycle.stop(reason, code)

    @property
    def agents(self) -> set[int]:
        """See `Roster.agents`. Empty before the end of the job."""
        return self._coordinator.agents

    @property
    def stood_down(self) -> bool:
        return self._coordinator.stood_down

    def stand_down(self) -> None:
        """Stops this coordinator without sending messages, because another one has been elected."""
        self._coordinator.stand_down()
        self.close()

    async def report(self) -> None:
        """Prints the report of the run. Does not wait for a paused pager."""
        self._progress.say(await in_thread(guarded_returning(str)(report), self._run))
        await self._screen.flushed(SCREEN_SECONDS)

    def close(self) -> None:
        self._state.lease.revoke()
        self.ended.cancel()
        self._beating.cancel()
        self._exporters.kill()
        self._events.close()

    def _term(self) -> int:
        """The term of the lease. The first coordinator of a job may lead several terms in a row."""
        return self._state.lease.term

    async def _coordinate(self) -> int:
        """Runs the coordinator. Returns the job's exit code. Prints the traceback of an exception, which is a bug."""
        code = 1
        try:
            code = await self._coordinator.run()
        except Exception:
            traceback.print_exc()
        finally:
            if not self._coordinator.stood_down:
                self._run.later(self._heartbeat.end, self._state.job.workers.values(), code)
        await self._run.later.flushed(WRITE_SECONDS)
        await self._exporters.close()  # after the last write, so that the copy in a store includes the end of the run
        await self._screen.flushed(SCREEN_SECONDS)
        return code

    async def _beat(self) -> None:
        """Writes heartbeat.json until the job is over."""
        for beat in itertools.count():
            if self._state.lifecycle.over:
                return
            if beat in FREEZES:
                gc.freeze()
            await self._state.lease.wait()
            self._run.later(self._heartbeat.write, self._state.job.workers.values(), self._patience())
            self._run.later(self._run.lock_if_free)  # a lost coordinator may have held the lock until now
            self._state.recorder.retry()
            self._exporters.look()
            await asyncio.sleep(SECONDS)

    def _patience(self) -> float:
        """See `Sign.patience`. 0 if all supervisors are on one node, because its launcher ends them together."""
        several = len({rank.node for rank in self._state.roster if rank.node is not None}) > 1
        return self._state.settings.control.suspicion + PLANNING + TAKEOVER_SECONDS if several else 0.0
