"""Decides which workers are live, what runs and what is committed: `protocol.Job` on real connections.

    coordinator = Coordinator(settings, run, events, progress, agreement, leader)
    await coordinator.handle(peer)        # a supervisor or a worker has connected
    code = await coordinator.run()        # 0, or the exit code of a job that had to stop

It has two kinds of clients: the supervisor of each rank, which starts and watches a worker and decides nothing
(`supervisors.py`), and the worker (`workers.py`). Their messages become events of the job (`driver.py`) or deaths
(`deaths.py`). `hang_detector.py` finds stuck workers. `coordinator.py` connects these parts, and starts and ends the
job.

The coordinator has no state that its clients could not report again, so it may run on any node. `successor.py`
replaces a lost coordinator.
"""

from __future__ import annotations

import asyncio
import time
import traceback

from recycle_schedules import Worker

from recycle_pp.config.settings import Settings
from recycle_pp.consensus.agreement import Agreement, Deposed
from recycle_pp.consensus.leader_lease import LeaderLease
from recycle_pp.protocol.events import LinksBroken
from recycle_pp.protocol.liveness import Stuck
from recycle_pp.telemetry.event_log import EventLog
from recycle_pp.telemetry.events.job import WaitsForData
from recycle_pp.telemetry.events.recovery import Renewed
from recycle_pp.telemetry.progress import Progress
from recycle_pp.telemetry.recorder import Recorder
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.timing.span_tables import SpanTables
from recycle_pp.wire.connection import Peer
from recycle_pp.wire.messages.agreement import Leader
from recycle_pp.wire.messages.handshake import SupervisorHello, WorkerHello
from recycle_pp.wire.messages.lifecycle import Exit
from recycle_pp.wire.messages.supervisors import FROM_SUPERVISOR, Finish
from recycle_pp.wire.messages.table import Message
from recycle_pp.wire.messages.workers import FROM_WORKER

from .arrivals import Starting, until_all_have_come, until_first_step
from .checkpoints import Saving, Whole
from .context import Context
from .deaths import Deaths
from .driver import Driver
from .hang_detector import HangDetector, Standing
from .job import new_job
from .lifecycle import Lifecycle
from .ranks import Rank
from .restart_policy import RestartPolicy
from .returns import Returns
from .roster import Roster
from .supervisors import Supervisors
from .timers import Timers
from .workers import Workers

LATE_SECONDS = 20.0  # time for late ranks to connect after a refused start
WRITE_SECONDS = 10.0  # time for unfinished writes to the run folder at the end


class Coordinator:
    def __init__(
        self,
        settings: Settings,
        run: RunFolder,
        events: EventLog,
        progress: Progress,
        agreement: Agreement,
        leader: Leader,
        whole: Whole,
    ) -> None:
        """whole: the checkpoint to start from, with run.resume."""
        self._settings = settings
        self._run = run
        self._agreement = agreement
        self._world = settings.parallel.pipelines * settings.parallel.stages
        self.gave_way = False
        self.agents: set[int] = set()  # the launch's agents that live at the end
        saving = Saving(run.checkpoints, whole.step)
        job = new_job(settings, whole.step)
        spans = SpanTables()
        self._recorder = Recorder(settings, run, events, progress, job, spans)
        self.lease = LeaderLease(agreement, settings.control.suspicion, self.give_way)
        self._roster = Roster(settings)
        self._restarts = RestartPolicy(settings)
        self._timers = Timers(self._failed, self.lease)
        self._lifecycle = Lifecycle(self._recorder, lambda: self._deaths.close())
        context = Context(
            settings,
            run,
            self._roster,
            self._restarts,
            self._timers,
            self._recorder,
            self._lifecycle,
            self.lease,
            spans,
        )
        self._driver = Driver(context, agreement, saving, job, deposed=self.give_way)
        self._deaths = Deaths(context, self._driver)
        self._hangs = HangDetector(settings, self._roster, self, run.hangs, run.later, self.lease)
        returns = Returns(context)
        self._supervisors = Supervisors(context, leader, self._driver, self._deaths, self._hangs, returns)
        self._workers = Workers(context, self._driver, self._deaths, self._hangs, returns)
        self._driver.report_damage(whole.damaged)
        if whole.damaged and not whole.step:
            self.stop(f"run.resume=true: all checkpoints in {run.checkpoints} are damaged")

    # -- the job's life ----------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Blocks until the job ends. Returns its exit code."""
        detection = asyncio.create_task(self._detect_hangs())
        arrivals = asyncio.create_task(self._report_start())
        code = await self._lifecycle.ended()
        detection.cancel()
        arrivals.cancel()
        if self.gave_way:
            return code
        self.lease.close()
        self.agents = self._roster.agents()
        self._roster.broadcast(Exit())
        for rank in self._roster:
            rank.send(Finish(code, self._lifecycle.reason))
        await self._wait_for_late_ranks()
        self._driver.agreement_gate.close()
        await self._wait_for_ends()
        self._recorder.close()
        await self._recorder.flushed(WRITE_SECONDS)
        return code

    def stop(self, reason: str, code: int = 1) -> None:
        self._lifecycle.stop(reason, code)

    def _failed(self, text: str) -> None:
        self.stop(f"the coordinator failed:\n{text}")

    def give_way(self) -> None:
        """Ends without sending messages, because another coordinator has been elected and decides now."""
        if not self.gave_way:
            self.gave_way = True
            self.lease.revoke()
            self._driver.agreement_gate.close()
            self._timers.close()
            self._recorder.abandon()
            self._lifecycle.end(1)

    @property
    def over(self) -> bool:
        return self._lifecycle.over

    def retry_writes(self) -> None:
        """Retries lines that the disk of the run folder has rejected."""
        self._recorder.retry()

    @property
    def live(self) -> set[Worker]:
        return self._driver.job.live

    async def _wait_for_late_ranks(self) -> None:
        """After a refused start, waits for late ranks, so that they get the reason too."""
        deadline = time.monotonic() + LATE_SECONDS
        while self._lifecycle.code == 2 and not self._roster.complete and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    async def _wait_for_ends(self, seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while any(rank.alive for rank in self._roster) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    # -- connections -------------------------------------------------------------------------------------------

    async def handle(self, peer: Peer) -> None:
        """Serves a connection until it ends. An exception in a handler stops the job with the traceback; otherwise the
        exception would look like the death of the client."""
        peer.set_keepalive(self._settings.control.suspicion)
        try:
            match peer.hello:
                case SupervisorHello():
                    await self._handle_supervisor(peer, peer.hello)
                case WorkerHello():
                    await self._handle_worker(peer, peer.hello)
        except Deposed:
            pass
        except Exception:
            self._failed(traceback.format_exc())

    async def _handle_supervisor(self, peer: Peer, hello: SupervisorHello) -> None:
        await self.lease.wait()
        number = self._supervisors.welcome(peer, hello)
        if number is not None:
            async for message in peer.listen(FROM_SUPERVISOR):
                await self.lease.wait()
                self._receive_from_supervisor(number, message, peer)
            await self.lease.fresh()
            self._lose_supervisor(number, peer)

    def _receive_from_supervisor(self, number: int, message: Message, peer: Peer) -> None:
        self._supervisors.receive(number, message, peer)

    def _lose_supervisor(self, number: int, peer: Peer) -> None:
        self._supervisors.lost(number, peer)

    async def _handle_worker(self, peer: Peer, hello: WorkerHello) -> None:
        await self.lease.wait()
        rank = self._workers.welcome(peer, hello)
        if rank is not None:
            async for message in peer.listen(FROM_WORKER):
                await self.lease.wait()
                self._workers.receive(rank, hello.incarnation, message)
            await self.lease.fresh()
            self._workers.lost(rank, hello.incarnation, peer)

    # -- the start ---------------------------------------------------------------------------------------------

    async def _report_start(self) -> None:
        await until_all_have_come(self._roster, self._world, self._recorder.say, self.stop)
        await until_first_step(self._starting, self._recorder.say)

    def _starting(self) -> list[Starting] | None:
        """The workers that the first step waits for; None after its commit."""
        job = self._driver.job
        if self._lifecycle.over or job.committed >= job.first_step:
            return None
        awaited = [rank for rank in self._roster if rank.alive and (job.started or rank.role not in job.live)]
        return [
            Starting(str(rank.role), rank.number, rank.host or "?", self._hangs.start_in_words(rank))
            for rank in awaited
        ]

    # -- hangs -------------------------------------------------------------------------------------------------

    async def _detect_hangs(self) -> None:
        try:
            await self._hangs.run()
        except Deposed:
            pass
        except Exception:
            self._failed(traceback.format_exc())

    def standing(self) -> Standing:
        return self._driver.standing()

    def profiled(self, worker: Worker, kind: str) -> float | None:
        return self._driver.planning.profiled(worker, kind)

    def message_seconds(self, a: Worker, b: Worker) -> float:
        return self._driver.message_seconds(a, b)

    def hung(self, rank: Rank, stuck: Stuck) -> None:
        self._deaths.end_stuck(rank, stuck)

    def awaits_data(self, workers: list[Worker], path: str, seconds: float) -> None:
        names = [str(worker) for worker in workers]
        self._recorder.event(WaitsForData(path=path, waiting=names, seconds=round(seconds, 1)))

    def renew(self, waiting: list[Worker]) -> None:
        self._recorder.event(Renewed(waiting=[str(worker) for worker in waiting]))
        self._driver.drive(LinksBroken())
