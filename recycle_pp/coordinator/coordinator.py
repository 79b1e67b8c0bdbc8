"""The coordinator of a job: decides which workers are live, plans their work, and commits steps.

    coordinator = Coordinator(settings, run, events, progress, agreement, leader, whole)      # starts a job
    coordinator = Coordinator(..., takeover=takeover, token=token)      # replaces a lost coordinator
    await coordinator.handle(peer)        # serves the connection of a supervisor or a worker
    code = await coordinator.run()        # the job's exit code

It has three kinds of clients: workers (`workers.py`), supervisors (`supervisors.py`), and commands of an operator
(`operators.py`). Supervisors start and watch workers, but decide nothing. The clients' messages become events of
`protocol.Job` (`driver.py`) or deaths (`deaths.py`). `hang_detector.py` finds stuck workers. All handlers share one
state (`state.py`). This module connects the handlers, and starts and ends the job.

The coordinator can run on any node, because its state can be rebuilt from its clients' reports. `successor.py` replaces
a lost coordinator.
"""

from __future__ import annotations

import asyncio
import time

from recycle_pp.config.settings import Settings
from recycle_pp.consensus.agreement import Agreement
from recycle_pp.consensus.leader_lease import LeaderLease
from recycle_pp.telemetry.event_log import EventLog
from recycle_pp.telemetry.progress import Progress
from recycle_pp.telemetry.recorder import Recorder
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.timing.span_tables import SpanTables
from recycle_pp.wire.connection import Peer
from recycle_pp.wire.messages.agreement import Leader, Takeover
from recycle_pp.wire.messages.handshake import OperatorHello, SupervisorHello, WorkerHello
from recycle_pp.wire.messages.lifecycle import Exit
from recycle_pp.wire.messages.supervisors import FROM_SUPERVISOR, Finish
from recycle_pp.wire.messages.workers import FROM_WORKER

from .after_commit import AfterCommit
from .arrivals import until_first_step, wait_for_arrivals
from .broken_links import BrokenLinks
from .checkpoints import NOTHING, Whole
from .deaths import Deaths
from .driver import Driver
from .failover_discovery import FailoverDiscovery
from .hang_detector import HangDetector
from .job import new_job
from .operators import Operators
from .planning import Planning
from .rebalancing import Rebalancing
from .returns import Returns
from .rounds import Rounds
from .state import JobState
from .successor import Successor
from .supervisors import Supervisors
from .understudies import Understudies
from .workers import Workers

LATE_SECONDS = 20.0  # time for late ranks to connect after a refused start
WRITE_SECONDS = 10.0  # longest wait at the end of the job for unfinished writes to the run folder


class Coordinator:
    def __init__(
        self,
        settings: Settings,
        run: RunFolder,
        events: EventLog,
        progress: Progress,
        agreement: Agreement,
        leader: Leader,
        whole: Whole = NOTHING,
        takeover: Takeover | None = None,
        token: str = "",
        job_id: str = "",
    ) -> None:
        """
        whole     the checkpoint to start from, with run.resume
        takeover  the election that made this coordinator replace a lost one; None in a new job
        token     the job's token; used only in a takeover
        job_id    see `SupervisorWelcome`
        """
        self.stood_down = False
        self.agents: set[int] = set()  # see `Roster.agents`; set when the job ends
        lease = LeaderLease(agreement, settings.control.suspicion)
        run.later.permitted = lease.permits
        spans, job = SpanTables(), new_job(settings, whole.step)
        recorder = Recorder(settings, run, events, progress, job, spans)
        state = self.state = JobState(settings, run, recorder, lease, spans, job)
        driver = self._driver = Driver(state, agreement)
        planning = Planning(state, driver)
        after_commit = AfterCommit(state, driver)
        deaths = Deaths(state, driver, after_commit)
        rebalancing = Rebalancing(state, driver, planning)
        operators = self._operators = Operators(state, driver, deaths)
        rounds = Rounds(state)
        driver.handlers = (
            recorder,
            rounds,
            planning,
            after_commit,
            deaths,
            rebalancing,
            Understudies(state),
            operators,
        )
        returns = Returns(state)
        links = BrokenLinks(state, driver, deaths, returns)
        hangs = self._hangs = HangDetector(state, driver, planning, deaths)
        self._supervisors = Supervisors(state, leader, driver, deaths, hangs, returns, operators, job_id)
        self._workers = Workers(state, driver, after_commit, deaths, hangs, links, rebalancing, operators, rounds)
        self._successor = takeover and Successor(
            state, driver, after_commit, deaths, self._workers, agreement, takeover, FailoverDiscovery(token)
        )
        after_commit.report_damage(whole.damaged)
        if whole.damaged and not whole.step:
            state.lifecycle.stop(f"run.resume=true: all checkpoints in {run.checkpoints} are damaged")

    # -- the job's life ----------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Runs until the job ends. Returns its exit code."""
        state = self.state
        loss = asyncio.create_task(self._stand_down_when_lost())
        if self._successor is not None:
            await state.lifecycle.guard(self._take_over, self._successor)
        detection = asyncio.create_task(state.lifecycle.guard(self._hangs.run))
        arrivals = asyncio.create_task(self._report_start())
        code = await state.lifecycle.ended()
        for task in (loss, detection, arrivals):
            task.cancel()
        if self.stood_down:
            return code
        state.lease.close()
        self.agents = state.roster.agents()
        state.roster.broadcast(Exit())
        for rank in state.roster:
            rank.send(Finish(code, state.lifecycle.reason))
        await self._wait_for_late_ranks()
        self._driver.agreement_gate.close()
        await self._wait_for_ends()
        state.recorder.close()
        await state.recorder.flushed(WRITE_SECONDS)
        return code

    async def _take_over(self, successor: Successor) -> None:
        beating = asyncio.create_task(successor.discovery.beat(self.state.lease))
        try:
            await successor.take_over()
        finally:
            beating.cancel()
        for signal in successor.discovery.signals():
            self._supervisors.receive(*signal)

    async def _stand_down_when_lost(self) -> None:
        await self.state.lease.lost()
        self.stand_down()

    def stand_down(self) -> None:
        """Stops without sending messages, because another coordinator has been elected."""
        if not self.stood_down:
            self.stood_down = True
            self.state.lease.revoke()
            self._driver.agreement_gate.close()
            self.state.timers.close()
            self.state.recorder.abandon()
            self.state.lifecycle.end(1)

    async def _report_start(self) -> None:
        parallel = self.state.settings.parallel
        world = parallel.pipelines * parallel.stages
        missing = await wait_for_arrivals(self.state.roster, world, self.state.recorder.say)
        if missing is not None:
            self.state.lifecycle.stop(missing)
        await until_first_step(self.state, self._hangs)

    async def _wait_for_late_ranks(self) -> None:
        """If the start was refused, waits for late ranks, so that they receive the reason too."""
        deadline = time.monotonic() + LATE_SECONDS
        while self.state.lifecycle.code == 2 and not self.state.roster.complete and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    async def _wait_for_ends(self, seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while any(rank.alive for rank in self.state.roster) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    # -- connections -------------------------------------------------------------------------------------------

    async def handle(self, peer: Peer) -> None:
        """Serves a connection until it ends."""
        peer.set_keepalive(self.state.settings.control.suspicion)
        match peer.hello:
            case SupervisorHello():
                await self.state.lifecycle.guard(self._handle_supervisor, peer, peer.hello)
            case WorkerHello():
                await self.state.lifecycle.guard(self._handle_worker, peer, peer.hello)
            case OperatorHello():
                await self.state.lifecycle.guard(self._handle_operator, peer)

    async def _handle_supervisor(self, peer: Peer, hello: SupervisorHello) -> None:
        lease = self.state.lease
        await lease.wait()
        number = self._supervisors.welcome(peer, hello)
        if number is not None:
            async for message in peer.listen(FROM_SUPERVISOR):
                await lease.wait()
                self._registry.receive(number, message, peer)
            await lease.fresh()
            self._registry.lost(number, peer)

    async def _handle_operator(self, peer: Peer) -> None:
        if self._successor is not None:
            await self._successor.discovery.over.wait()
        await self._operators.serve(peer)

    @property
    def _registry(self) -> Supervisors | FailoverDiscovery:
        """The handler of supervisors' messages. During a takeover, this is the discovery of the new coordinator."""
        if self._successor is None or self._successor.discovery.over.is_set():
            return self._supervisors
        return self._successor.discovery

    async def _handle_worker(self, peer: Peer, hello: WorkerHello) -> None:
        lease = self.state.lease
        await lease.wait()
        if self._successor is not None and not await self._successor.has_met(peer, hello):
            return
        rank = self._workers.welcome(peer, hello)
        if rank is not None:
            async for message in peer.listen(FROM_WORKER):
                await lease.wait()
                self._workers.receive(rank, hello.incarnation, message)
            await lease.fresh()
            self._workers.lost(rank, hello.incarnation, peer)
