"""The process that the launcher starts for each rank: it starts the worker, sees it die, and decides nothing.

    code = asyncio.run(supervise(launch, address=None, settings=settings, run=run))   # rank 0: the first to coordinate
    code = asyncio.run(supervise(launch))                                             # another rank of one node
    code = asyncio.run(supervise(launch, address=Address.of_cluster(...)))            # of several nodes
    code = asyncio.run(supervise(launch, address, joins=True))                        # of a job that runs already

A supervisor never imports torch: it starts in milliseconds, stays small, and outlives its worker, so that the launcher
sees nothing of a worker's death. `wire.messages.supervisors` has what it says to the coordinator and hears from it.

It listens from its first welcome on, for the agreement's connections, and for everybody's once it coordinates itself.
When the coordinator is lost the agreement says who is the next one; without a majority the supervisor ends its worker
and itself. The job's exit code is that of each node's first rank and of who coordinates; the others return 0, so that
the launcher reports one failure instead of all.

(Longer than other files: the conversation, the election and the end all act on this rank's one connection.)
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from recycle_pp.config.settings import Control, Settings
from recycle_pp.consensus.agreement import PLANNING, LostMajority
from recycle_pp.consensus.choice import make_agreement
from recycle_pp.consensus.process_identity import identity
from recycle_pp.consensus.refusal import REFUSED
from recycle_pp.telemetry import startup
from recycle_pp.telemetry.background import apart
from recycle_pp.telemetry.failure import fail, record_failure, refuse
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.telemetry.succession import Succession
from recycle_pp.wire.connection import Peer, connect, serve
from recycle_pp.wire.join import Entered, enter
from recycle_pp.wire.launch import Address, Launch, new_token, publish, withdraw
from recycle_pp.wire.messages.agreement import Leader, Place
from recycle_pp.wire.messages.handshake import CandidateHello, SupervisorHello
from recycle_pp.wire.messages.supervisors import (
    TO_SUPERVISOR,
    CoordinatorAt,
    CoordinatorHeartbeat,
    EndsSoon,
    Evict,
    Finish,
    Kill,
    NoPlace,
    Present,
    Probe,
    Probed,
    Redirect,
    Spawn,
    SupervisorHeartbeat,
    SupervisorWelcome,
)
from recycle_pp.wire.messages.table import Message
from recycle_pp.wire.worker_spec import WorkerSpec

from .exit_barrier import limit_wait, release
from .joining import JOIN_SECONDS, find_coordinator, why
from .leadership import Leadership
from .probing import unreachable
from .process_monitor import END_SECONDS, ProcessMonitor
from .shutdown import LEAVE_SECONDS, Shutdown
from .standby import Standby
from .watchdog import Watchdog

if TYPE_CHECKING:
    from recycle_pp.config.node_settings import NodeSettings
    from recycle_pp.coordinator.host import Host

PREPARE_SECONDS = 2.0  # after which what it takes to coordinate is imported: 0.7 s, 3 s on a crowded machine


async def supervise(
    launch: Launch,
    address: Address | None = None,
    settings: Settings | None = None,
    run: RunFolder | None = None,
    node: NodeSettings | None = None,
    joins: bool = False,
) -> int:
    """Runs one rank to the end of the job and returns the exit code of its process.

    address: of the coordinator; None: by the private file of this node. settings, run: rank 0's, the first host.
    node: what this node was started with, if the job has several.
    """
    supervisor = Supervisor(launch, joins=joins, node=node)
    try:
        if joins and address is not None:
            try:
                return await supervisor.run(address, await enter(address, supervisor.hello()))
            except ValueError as error:
                return refuse(str(error), launch.local_rank)
        if settings is not None and run is not None:
            try:
                address = await supervisor.found(address, settings, run)
            except ValueError as error:
                startup.end()
                run.unmake()
                return refuse(str(error))
        return await supervisor.run(address)
    finally:
        supervisor.close()
        Shutdown.close()


def _prepare_to_lead() -> None:
    importlib.import_module("recycle_pp.coordinator.host")


class Supervisor:
    """One rank's end of the conversation, and its worker."""

    def __init__(
        self,
        launch: Launch,
        module: str = "recycle_pp.execution.worker",
        joins: bool = False,
        node: NodeSettings | None = None,
    ):
        self._launch, self._joins, self._node = launch, joins, node
        self._monitor = ProcessMonitor(module, self._say)
        self._settings: Settings | None = None
        self._peer: Peer | None = None
        self._server: asyncio.Server | None = None
        self._place = Place("", 0)  # where it listens
        self._told: tuple[str, int] | None = None  # where the worker knows the coordinator
        self._leadership = Leadership(self._start_host, self._leave)
        self._watched: asyncio.Task[None] | None = None  # beats the watchdog
        self._standby: Standby | None = None
        self._probing: asyncio.Task[None] | None = None  # whether other nodes can be reached
        self._complained = ""  # of that, to the user
        self._unanswered_beats = 0  # heartbeats of its own since the coordinator's last message
        self._finished = False  # the coordinator has said so
        self._evicted = False  # this node's machine is taken away, and the job goes on without it
        self._shutdown = Shutdown(self._say)
        self._handlers: dict[type[Message], Callable[[Any], None]] = {
            Spawn: self._spawn,
            Kill: lambda message: self._monitor.kill(message.incarnation, message.stacks),
            Evict: self._evict,
            EndsSoon: self._shutdown.answer,
            CoordinatorHeartbeat: _heard,
            Redirect: self._redirected,
            Probe: self._probe,
        }

    async def found(self, address: Address | None, settings: Settings, run: RunFolder) -> Address:
        """Rank 0, at the start: coordinates, and lets the others find it; ValueError where it cannot."""
        wanted = address or Address("127.0.0.1", 0, new_token())
        startup.goes_on("imports what coordinates the job")
        try:
            await self._listen(wanted.host, wanted.port, wanted.token)
        except OSError as error:
            at = f"{wanted.host}:{wanted.port}"
            raise ValueError(
                f"control.address must be HOST:PORT of rank 0's node with a free port; {at}: {error.strerror}"
            ) from error
        self._settings, self._run, self._token = settings, run, wanted.token
        agreement = make_agreement(settings, self._launch.rank, self._place, wanted.token, None, run.first_term)
        try:
            await self._leadership.found(self._launch.rank, agreement)
        except LostMajority as lost:
            raise ValueError(str(lost)) from lost
        startup.end()
        bound = Address(self._place.host, self._place.port, wanted.token)
        if self._launch.one_node and self._launch.world > 1:
            publish(self._launch, bound)
        return bound

    async def run(self, address: Address | None, entered: Entered | None = None) -> int:
        """entered: of a newcomer, its connection to a job that runs already."""
        startup.end()
        self._shutdown.listen()
        serving = asyncio.create_task(self._serve(address, entered))
        await asyncio.wait({serving, self._shutdown.signal}, return_when=asyncio.FIRST_COMPLETED)
        code = await self._signalled(serving) if self._shutdown.signal.done() else serving.result()
        serving.cancel()
        await self._monitor.end(gently=code == 0)
        if self._launch.local_rank != 0 and (self._finished or self._peer is None):
            code = 0
        if self._peer is not None:
            self._peer.close()  # by this the coordinator knows that nothing of this rank is left
        host = self._leadership.host
        if host is not None and (self._finished or not self._evicted):
            with suppress(TimeoutError):
                ended = await asyncio.wait_for(host.ended, END_SECONDS)
                code = code or ended
            if code == 0:
                await host.report()
                lost = self._launch.agents - len(host.agents)
                if lost > 0 and 0 in host.agents:  # that agent hosts the agents' store
                    await release(self._launch, lost)
        if code == 0 and self._launch.local_rank == 0:
            limit_wait(self._launch)
        return code

    def close(self) -> None:
        """Nothing stays behind, whatever happened."""
        if self._watched is not None:
            self._watched.cancel()
        if self._leadership.host is not None:
            withdraw(self._launch)
        self._leadership.close()
        if self._server is not None:
            self._server.close()
        self._monitor.close()

    # ------------------------------------------------------------------------------------------- conversation

    async def _serve(self, address: Address | None, entered: Entered | None) -> int:
        """Does what the coordinator asks until it says `finish`; the exit code."""
        try:
            if entered is None:
                self._peer, place = await find_coordinator(self._launch, self.hello(), address)
            else:
                self._peer, place = entered.peer, entered.address
        except (OSError, ValueError) as error:
            if self._launch.local_rank == 0:
                where = f"{address.host}:{address.port}" if address else "this machine"
                if isinstance(error, OSError):
                    fail(f"no job of recycle_pp found at {where} in {JOIN_SECONDS / 60:.0f} minutes: {why(error)}")
                else:
                    fail(f"no job of recycle_pp at {where}: {error}")
            return 1
        self._token, where = place.token, f"{place.host}:{place.port}"
        if entered is not None:
            self._launch = replace(self._launch, rank=entered.welcome.rank)
            await self._welcomed(entered.welcome, entered.peer)
        while True:
            code = await self._converse(self._peer)
            if code is not None:
                return code
            try:
                leader = self._leadership.leader
                if leader is None:
                    raise LostMajority("it had not said yet what the job is")
                where = f"{leader.host}:{leader.port}"
                refused = min(REFUSED, self._settings.control.suspicion) if self._settings else REFUSED
                self._peer = await self._leadership.follow(self._connect, refused)
            except LostMajority as lost:
                if not self._shutdown.signal.done():
                    fail(f"rank {self._launch.rank} lost the coordinator at {where} and ends: {lost}")
                return 1

    async def _converse(self, peer: Peer) -> int | None:
        """With one coordinator; its exit code for this job, None if it is lost."""
        beat = asyncio.create_task(self._beat(peer))
        try:
            async for message in peer.listen(TO_SUPERVISOR):
                self._unanswered_beats = 0
                if isinstance(message, Finish):
                    self._finished = True
                    if message.code == 0 and message.reason and self._launch.local_rank == 0:
                        print(f"recycle_pp: {message.reason}", flush=True)
                    if message.code not in (0, 130, 143):  # torchrun's summary shows no signals
                        self._ended_by(message.reason)
                    return message.code
                if isinstance(message, NoPlace):  # given up meanwhile, and replaced
                    if self._launch.local_rank == 0:
                        fail(message.reason)
                    return 1
                if isinstance(message, SupervisorWelcome):
                    await self._welcomed(message, peer)
                else:
                    self._handlers[type(message)](message)
            return None
        finally:
            beat.cancel()

    def _ended_by(self, reason: str) -> None:
        """The coordinator has printed it, on its own node."""
        if self._launch.local_rank == 0 and self._leadership.host is None:
            fail(f"the job has stopped: {reason}")
        elif self._leadership.host is not None:
            record_failure(reason)

    async def _welcomed(self, message: SupervisorWelcome, peer: Peer) -> None:
        if self._settings is None:
            self._settings, self._run = message.settings, RunFolder(message.run_dir)
        self._standby = self._standby or Standby(self._launch, self._settings)
        if self._watched is None:
            self._watched = asyncio.create_task(self._beat_watchdog(self._settings.control))
        peer.set_keepalive(self._settings.control.suspicion)
        if self._leadership.leader is None:
            self._told = message.leader.host, message.leader.port
            await self._listen(self._interface or peer.local_host, 0, self._token)
            agreement = make_agreement(self._settings, self._launch.rank, self._place, self._token, message.leader)
            self._leadership.join(self._launch.rank, agreement, message.leader)
        monitor = self._monitor
        asked = dict(self._node.shared) if self._node is not None and monitor.order is None else None
        self._say(Present(self._place, monitor.order, monitor.alive, monitor.deaths, asked))
        self._shutdown.tell_again()

    async def _beat(self, peer: Peer) -> None:
        """Heartbeats, counted rather than timed: a pause of this very process is no silence of the coordinator."""
        while True:
            control = self._settings.control if self._settings else None
            beat = control.heartbeat if control else 1.0
            await asyncio.sleep(beat)
            signs = self._monitor.signs(2 * beat)
            self._say(SupervisorHeartbeat(signs))
            if self._standby is not None and self._settings is not None and self._standby.due(signs):
                self._monitor.stand_by(self._own_settings)
            self._unanswered_beats += 1
            if control and self._unanswered_beats * control.heartbeat > control.suspicion + PLANNING:
                peer.abort()

    async def _beat_watchdog(self, control: Control) -> None:
        watchdog = Watchdog(control.suspicion, f"rank {self._launch.rank}")
        try:
            while True:
                watchdog.beat()
                await asyncio.sleep(min(control.heartbeat, control.suspicion / 4))
        finally:
            watchdog.close()

    async def _connect(self, leader: Leader, seconds: float) -> Peer:
        """The worker learns a new place. To the same one it reconnects by itself, and its connection may stand yet."""
        peer = await connect(leader.host, leader.port, self._token, self.hello(), seconds)
        if (leader.host, leader.port) != self._told:
            self._told = leader.host, leader.port
            self._monitor.tell(CoordinatorAt(leader.host, leader.port))
        return peer

    def hello(self) -> SupervisorHello:
        agent = None if self._joins else self._launch.agent
        return SupervisorHello(self._launch.rank, socket.gethostname(), os.getpid(), agent)

    def _redirected(self, message: Redirect) -> None:
        """The connection ends, and the agreement says where to go."""
        self._leadership.sent_away = True

    def _spawn(self, message: Spawn) -> None:
        if self._monitor.order is None:  # at the start only: later its disk may not answer
            withdraw(self._launch)
        if not self._launch.one_node and self._launch.local_rank == 0:  # a node's first rank leads, if any does
            loop = asyncio.get_running_loop()
            loop.call_later(PREPARE_SECONDS, loop.run_in_executor, None, _prepare_to_lead)
        self._monitor.spawn(message, self._spec, self._run.log("{}.{}".format(*message.worker)))

    def _probe(self, message: Probe) -> None:
        self._probing = asyncio.create_task(self._answer_probe(message))

    async def _answer_probe(self, message: Probe) -> None:
        names = await unreachable(message.targets, self._token)
        sentence = (
            f"this node cannot reach {' and '.join(names)}: its workers start when the network between them works"
        )
        if names and self._launch.local_rank == 0 and sentence != self._complained:
            print(f"recycle_pp: {sentence}", file=sys.stderr, flush=True)
        self._complained = sentence
        self._say(Probed(names))

    def _evict(self, message: Evict) -> None:
        self._evicted = True
        self._monitor.evict()
        self._shutdown.answer(message)

    def _spec(self, incarnation: int) -> WorkerSpec:
        leader = self._leadership.leader
        assert leader is not None
        host, port, rank, settings = leader.host, leader.port, self._launch.rank, self._own_settings
        return WorkerSpec(host, port, self._token, rank, incarnation, str(self._run.path), settings)

    @property
    def _own_settings(self) -> dict[str, Any]:
        """The job's settings, with control.interface of this node."""
        assert self._settings is not None
        settings = asdict(self._settings)
        settings["control"]["interface"] = self._interface
        return settings

    @property
    def _interface(self) -> str | None:
        """control.interface of this node, or that of the job if this node gives none."""
        assert self._settings is not None
        return (self._node.interface if self._node is not None else None) or self._settings.control.interface

    def _say(self, message: Message) -> None:
        if self._peer is not None:
            self._peer.send(message)

    # ------------------------------------------------------------------------------------------- coordination

    async def _listen(self, host: str, port: int, token: str) -> None:
        self._server = await serve(self._handle, host, port, token)
        bound = self._server.sockets[0].getsockname()
        self._place = Place(bound[0], bound[1], identity())

    async def _handle(self, peer: Peer) -> None:
        if not isinstance(peer.hello, CandidateHello):
            await self._leadership.admit(peer)
        elif self._leadership.agreement is not None:
            await self._leadership.agreement.handle(peer)

    async def _start_host(self, leader: Leader, succession: Succession | None) -> Host:
        assert self._settings is not None and self._leadership.agreement is not None
        await asyncio.to_thread(_prepare_to_lead)
        from recycle_pp.coordinator.checkpoints import NOTHING, newest_whole
        from recycle_pp.coordinator.host import Host

        whole = NOTHING
        if self._settings.run.resume and succession is None:
            whole = await apart(newest_whole, self._run.checkpoints)
        agreement = self._leadership.agreement
        return Host(self._settings, self._run, agreement, leader, self._token, succession, whole)

    def _leave(self) -> None:
        if self._peer is not None:
            self._peer.abort()

    # ----------------------------------------------------------------------------------------------------- end

    async def _signalled(self, serving: asyncio.Task[int]) -> int:
        """The coordinator ends the job in its own order; or, where others stay, our worker hands over and leaves."""
        shutdown, host, number = self._shutdown, self._leadership.host, self._shutdown.signal.result()
        self._monitor.start_no_more()
        shutdown.tell()
        ends_soon = False
        if self._peer is not None:
            ends_soon = await shutdown.answered(serving)
        elif host is not None:
            host.stop(signal.Signals(number).name, 128 + number)
        if self._evicted:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._monitor.gone.wait(), LEAVE_SECONDS)
            if host is not None:  # the notices of other nodes may follow, and nobody else could end the job in order
                await shutdown.left(serving)
            return 0  # else the launcher would end the others of this node
        if ends_soon:
            await shutdown.saved(serving)
        done = self._finished and serving.done() and serving.result() == 0  # the last step was under way
        return 0 if done else 128 + number


def _heard(message: Message) -> None:
    """Nothing to be done: that it came is all."""
