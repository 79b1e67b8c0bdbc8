"""The process that the launcher starts for each rank: starts the worker, reports its death, follows the coordinator.

    code = asyncio.run(supervise(launch, address=None, settings=settings, run=run))   # rank 0, the first coordinator
    code = asyncio.run(supervise(launch))                                             # another rank of the same node
    code = asyncio.run(supervise(launch, address=Address.of_cluster(...)))            # a rank of another node
    code = asyncio.run(supervise(launch, address, joins=True))                        # a new node of a running job

A supervisor never imports torch. It starts in milliseconds, stays small and outlives its worker, so the launcher does
not notice a worker's death. `wire.messages.supervisors` lists its messages to and from the coordinator.

From its first welcome on, a supervisor listens for the agreement's connections. If it leads, it also accepts
supervisors and workers. When the coordinator is lost, the agreement elects the next leader; without a majority the
supervisor ends its worker and itself. The first rank of each node and the leader exit with the job's code, all other
ranks with 0, so that the launcher reports one failure.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from recycle_pp.command import say
from recycle_pp.config.settings import Settings
from recycle_pp.consensus.agreement import LostMajority
from recycle_pp.consensus.choice import make_agreement
from recycle_pp.consensus.process_identity import identity
from recycle_pp.consensus.refusal import REFUSED
from recycle_pp.linux.addresses import address_of
from recycle_pp.linux.descriptors import raise_limit
from recycle_pp.telemetry import startup
from recycle_pp.telemetry.background import in_thread, in_time
from recycle_pp.telemetry.contact_log import ContactLog
from recycle_pp.telemetry.failure import fail, record_failure, refuse
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.wire.connection import ChannelClosed, Peer, connect, serve
from recycle_pp.wire.join import Entered, Surplus, enter
from recycle_pp.wire.launch import Address, Launch, keep_token, new_token, publish, remove_token, withdraw
from recycle_pp.wire.messages.agreement import TO_VOTER, Leader, OtherJob, Place, Takeover
from recycle_pp.wire.messages.ctl import FROM_OPERATOR, Another
from recycle_pp.wire.messages.handshake import CandidateHello, OperatorHello, SupervisorHello, WorkerHello
from recycle_pp.wire.messages.supervisors import (
    TO_SUPERVISOR,
    CoordinatorAt,
    CoordinatorHeartbeat,
    Died,
    EndsSoon,
    Evict,
    Finish,
    KeepLines,
    Kill,
    NoPlace,
    Probe,
    Redirect,
    Registration,
    ShowStacks,
    Spawn,
    SupervisorWelcome,
)
from recycle_pp.wire.messages.table import Message
from recycle_pp.wire.worker_spec import WorkerSpec

from .exit_barrier import limit_wait, release
from .hardware import Hardware
from .heartbeats import Heartbeats
from .joining import JOIN_SECONDS, explain, find_coordinator
from .leadership import Leadership
from .probing import Prober
from .process_monitor import END_SECONDS, ProcessMonitor
from .quick_check import QuickCheck
from .shutdown import LEAVE_SECONDS, Shutdown

if TYPE_CHECKING:
    from recycle_pp.config.node_settings import NodeSettings
    from recycle_pp.coordinator.host import Host

FILES = 64  # open files of a coordinator, not counting connections
FILES_PER_WORKER = 3  # the worker's connection, its supervisor's, and a new one while an old one ends
REPORT_SECONDS = 20.0  # longest wait at the end of the job for the report of the run
PREPARE_SECONDS = 2.0  # delay before the import of the coordinator's modules (0.7 s, or 3 s on a busy machine)


class Ended(NamedTuple):
    """The end of one rank.

    code           exit code of its process
    settings, run  of the job, if all its steps are done and this rank was its last coordinator; else None
    """

    code: int
    settings: Settings | None = None
    run: RunFolder | None = None


async def supervise(
    launch: Launch,
    address: Address | None = None,
    settings: Settings | None = None,
    run: RunFolder | None = None,
    node: NodeSettings | None = None,
    joins: bool = False,
) -> Ended:
    """Runs one rank to the end of the job.

    address        address of the coordinator; None: a private file on this node contains the address
    settings, run  only given to rank 0, the first leader
    node           this node's own settings, if the job has several nodes
    joins          whether this is a new node of a running job
    """
    supervisor, open_files = Supervisor(launch, joins=joins, node=node), raise_limit()
    try:
        if joins and address is not None:
            try:
                return await supervisor.run(address, await enter(address, supervisor.hello()))
            except Surplus as error:  # end with 0: other codes make the launcher end the processes that have joined
                say(f"recycle_pp: {error}")
                return Ended(0)
            except ValueError as error:
                return Ended(refuse(str(error), launch.local_rank))
        if settings is not None and run is not None:
            try:
                _check_open_files(launch.world, open_files)
                address = await supervisor.start_job(address, settings, run)
            except ValueError as error:
                startup.end()
                run.remove_new()
                return Ended(refuse(str(error)))
        return await supervisor.run(address)
    finally:
        supervisor.close()
        Shutdown.close()


def _check_open_files(world: int, limit: int) -> None:
    """Raises ValueError if a coordinator of so many workers could not accept their connections."""
    need = FILES + FILES_PER_WORKER * world
    if limit < need:
        raise ValueError(
            f"the coordinator of {world} workers may need {need} open files, and the hard limit is {limit}; raise it "
            f"(ulimit -Hn {need}, docker run --ulimit nofile={need})"
        )


def _import_coordinator() -> None:
    importlib.import_module("recycle_pp.coordinator.host")


class Supervisor:
    """One rank: its worker process and its connection to the coordinator."""

    def __init__(
        self,
        launch: Launch,
        module: str = "recycle_pp.execution.worker",
        joins: bool = False,
        node: NodeSettings | None = None,
    ):
        self._launch = launch
        self._joins = joins
        self._node = node
        self._monitor = ProcessMonitor(module, self._report_process)
        self._hardware = Hardware(launch, self._monitor, self._send)
        self._settings: Settings | None = None
        self._peer: Peer | None = None
        self._server: asyncio.Server | None = None
        self._job_id = ""  # "" until this rank has started or entered the job
        self._place = Place("", 0)  # address at which this supervisor listens
        self._sent_address: tuple[str, int] | None = None  # the coordinator's address last sent to the worker
        self._leadership = Leadership(self._start_host, self._disconnect)
        self._heartbeats = Heartbeats(launch, self._monitor)
        self._check = QuickCheck(self._send)
        self._prober = Prober(self._send, prints=launch.local_rank == 0)
        self._finished = False  # whether the coordinator has sent `Finish`
        self._token_file: Path | None = None  # set while this rank hosts the coordinator of a job on one node
        self._contact: ContactLog | None = None  # set when a coordinator is lost for the first time
        self._evicted = False  # whether the job continues without this node, whose machine will be taken away
        self._shutdown = Shutdown(self._send)
        self._handlers: dict[type[Message], Callable[[Any], None]] = {
            Spawn: self._spawn,
            Kill: lambda message: self._monitor.kill(message.incarnation, message.stacks),
            ShowStacks: lambda message: self._monitor.show_stacks(message.incarnation),
            Evict: self._evict,
            EndsSoon: self._shutdown.answer,
            KeepLines: lambda message: self._run.kept.receive(message),
            CoordinatorHeartbeat: _ignore,
            Redirect: self._redirected,
            Probe: lambda message: self._prober.answer(message, self._token),
        }

    async def start_job(self, address: Address | None, settings: Settings, run: RunFolder) -> Address:
        """Starts a new job as its first leader and publishes the address. Raises ValueError if this is impossible."""
        wanted = address or Address("127.0.0.1", 0, new_token())
        startup.update("imports the coordinator")
        try:
            await self._listen(wanted.host, wanted.port, wanted.token, settings)
        except OSError as error:
            raise ValueError(
                f"control.address must be HOST:PORT of rank 0's node with a free port; {wanted}: {error.strerror}"
            ) from error
        self._settings = settings
        self._run = run
        self._token = wanted.token
        self._job_id = secrets.token_hex(8)
        agreement = make_agreement(
            settings, self._launch.rank, self._place, wanted.token, self._job_id, None, run.first_term
        )
        try:
            await self._leadership.start(agreement)
        except LostMajority as lost:
            raise ValueError(str(lost)) from lost
        startup.end()
        self._heartbeats.begin(self._own_settings)
        self._hardware.begin(settings, run)
        bound = Address(self._place.host, self._place.port, wanted.token)
        if self._launch.one_node and self._launch.world > 1:
            publish(self._launch, bound)
        return bound

    async def run(self, address: Address | None, entered: Entered | None = None) -> Ended:
        """Runs to the end of the job. entered: the connection of a new node to a running job; None for
        a rank that starts with the job."""
        startup.end()
        self._shutdown.listen()
        serving = asyncio.create_task(self._serve(address, entered))
        await asyncio.wait({serving, self._shutdown.signal}, return_when=asyncio.FIRST_COMPLETED)
        code = await self._handle_signal(serving) if self._shutdown.signal.done() else serving.result()
        serving.cancel()
        await self._monitor.end(gently=code == 0)
        if self._launch.local_rank != 0 and (self._finished or self._peer is None):
            code = 0
        if self._peer is not None:
            self._peer.close()  # the coordinator now counts this rank as ended
        host = self._leadership.host
        if host is not None and (self._finished or not self._evicted):
            with suppress(TimeoutError):
                ended = await asyncio.wait_for(host.ended, END_SECONDS)
                code = code or ended
            if code == 0:
                with suppress(TimeoutError):  # the run folder's disk does not answer
                    await asyncio.wait_for(host.report(), REPORT_SECONDS)
                await release(self._launch, self._launch.agents - len(host.agents))
        if code == 0 and self._launch.local_rank == 0:
            limit_wait(self._launch)
        done = code == 0 and self._finished and host is not None
        return Ended(code, self._settings, self._run) if done else Ended(code)

    def close(self) -> None:
        """Ends all processes, tasks and connections, in any state."""
        self._heartbeats.close()
        self._hardware.close()
        self._check.close()
        if self._leadership.host is not None:
            withdraw(self._launch)
            if self._token_file is not None:
                remove_token(self._token_file)
        self._leadership.close()
        if self._server is not None:
            self._server.close()
        self._monitor.close()
        if self._contact is not None:
            self._contact.flush()

    # -------------------------------------------------------------------------------------- following orders

    async def _serve(self, address: Address | None, entered: Entered | None) -> int:
        """Follows the orders of one coordinator after another until `Finish`. Returns the exit code."""
        try:
            if entered is None:
                self._peer, place = await find_coordinator(self._launch, self.hello(), address)
            else:
                self._peer = entered.peer
                place = entered.address
        except (OSError, ValueError) as error:
            if self._launch.local_rank == 0:
                where = str(address or "this machine")
                if isinstance(error, OSError):
                    fail(f"no recycle_pp job found at {where} in {JOIN_SECONDS / 60:.0f} minutes: {explain(error)}")
                else:
                    fail(f"no recycle_pp job at {where}: {error}")
            return 1
        self._token = place.token
        where = str(place)
        if entered is not None:
            self._launch = replace(self._launch, rank=entered.welcome.rank)
            await self._on_welcome(entered.welcome, entered.peer)
        while True:
            code = await self._follow_orders(self._peer)
            if code is not None:
                return code
            self._shutdown.lost = True
            try:
                leader = self._leadership.leader
                if leader is None:
                    raise LostMajority("the coordinator had not sent the settings yet")
                where = str(leader)
                contact = self._contact = self._contact or ContactLog(self._run, self._launch.rank)
                contact.write("lost", f"rank {leader.rank} at {where}")
                refused = min(REFUSED, self._settings.control.suspicion) if self._settings else REFUSED
                self._peer = await self._leadership.follow(self._connect, refused)
                assert self._leadership.leader is not None
                contact.write("follows", f"rank {self._leadership.leader.rank}")
            except LostMajority as lost:
                if self._contact is not None:
                    self._contact.write("gave_up", str(lost))
                if not self._shutdown.signal.done():
                    fail(f"rank {self._launch.rank} lost the coordinator at {where} and exits: {lost}")
                return 1

    async def _follow_orders(self, peer: Peer) -> int | None:
        """Follows one coordinator's orders. Returns the job's exit code, or None if the coordinator is lost."""
        beats = asyncio.create_task(self._heartbeats.send(peer))
        try:
            async for message in peer.listen(TO_SUPERVISOR):
                self._heartbeats.answered()
                if isinstance(message, Finish):
                    self._finished = True
                    if message.code == 0 and message.reason and self._launch.local_rank == 0:
                        print(f"recycle_pp: {message.reason}", flush=True)
                    if message.code not in (0, 130, 143):  # 130, 143: signals, which torchrun's summary does not show
                        self._report_failure(message.reason)
                    return message.code
                if isinstance(message, NoPlace):  # a new node has taken over this rank
                    if self._launch.local_rank == 0:
                        fail(message.reason)
                    return 1
                if isinstance(message, SupervisorWelcome):
                    await self._on_welcome(message, peer)
                else:
                    self._handlers[type(message)](message)
            return None
        finally:
            beats.cancel()

    def _report_failure(self, reason: str) -> None:
        """Prints and records the reason of the job's failure, on the first rank of each node. The coordinator's rank
        only records it, because the coordinator has already printed it."""
        if self._launch.local_rank == 0 and self._leadership.host is None:
            fail(f"the job has stopped: {reason}")
        elif self._leadership.host is not None:
            record_failure(reason)

    async def _on_welcome(self, message: SupervisorWelcome, peer: Peer) -> None:
        if self._settings is None:
            self._job_id = message.job_id
            self._settings = message.settings
            self._run = RunFolder(message.run_dir)
            self._heartbeats.begin(self._own_settings)
            self._hardware.begin(self._settings, self._run, message.quarantined)
        peer.set_keepalive(self._settings.control.suspicion)
        if self._leadership.leader is None:
            self._sent_address = message.leader.host, message.leader.port
            interface = self._own_settings.control.interface
            host = address_of(interface) if interface else peer.local_host
            await self._listen(host, 0, self._token, self._settings)
            rank, token, others = self._launch.rank, self._token, message.places
            agreement = make_agreement(
                self._settings, rank, self._place, token, self._job_id, message.leader, others=others
            )
            self._leadership.join(agreement, message.leader)
        monitor = self._monitor
        begins = self._node is not None and monitor.order is None
        asked, clock = (dict(self._node.shared), time.time()) if self._node is not None and begins else (None, None)
        self._send(Registration(self._place, monitor.order, monitor.alive, monitor.deaths, asked, clock))
        if begins and self._launch.local_rank == 0:
            self._check.begin(self._run, self._settings)
        self._shutdown.repeat_report()

    async def _connect(self, leader: Leader, seconds: float) -> Peer:
        """Connects to the leader, and sends its address to the worker if it has changed."""
        peer = await connect(leader.host, leader.port, self._token, self.hello(), seconds)
        if (leader.host, leader.port) != self._sent_address:
            self._sent_address = leader.host, leader.port
            self._monitor.send_to_worker(CoordinatorAt(leader.host, leader.port))
        return peer

    def hello(self) -> SupervisorHello:
        agent = None if self._joins else self._launch.agent
        launch, launcher = self._launch, os.getppid() if self._joins else 0
        host, pid = socket.gethostname(), os.getpid()
        return SupervisorHello(launch.rank, host, pid, agent, launch.local_world, self._job_id, launcher)

    def _redirected(self, message: Redirect) -> None:
        """Notes that the sender does not coordinate. The sender then closes the connection, and `follow` finds the
        leader."""
        self._leadership.redirected = True

    def _spawn(self, message: Spawn) -> None:
        if self._monitor.order is None:  # remove the private file only at the start: its disk may not answer later
            withdraw(self._launch)
        # The first rank of each node prepares to coordinate, because the next leader is probably one of them.
        if not self._launch.one_node and self._launch.local_rank == 0:
            loop = asyncio.get_running_loop()
            loop.call_later(PREPARE_SECONDS, loop.run_in_executor, None, _import_coordinator)
        self._monitor.spawn(message, self._spec, self._run.log("{}.{}".format(*message.worker)))

    def _evict(self, message: Evict) -> None:
        self._evicted = True
        self._monitor.evict()
        self._shutdown.answer(message)

    def _spec(self, incarnation: int) -> WorkerSpec:
        leader = self._leadership.leader
        assert leader is not None
        at = leader.host, leader.port
        settings = asdict(self._own_settings)
        return WorkerSpec(*at, self._token, self._job_id, self._launch.rank, incarnation, str(self._run.path), settings)

    @property
    def _own_settings(self) -> Settings:
        """The job's settings, with this node's own control.interface if the node has one."""
        assert self._settings is not None
        interface = self._node.interface if self._node is not None else None
        return self._settings.with_values({"control.interface": interface}) if interface else self._settings

    def _report_process(self, message: Message) -> None:
        self._send(message)
        if isinstance(message, Died):
            self._hardware.look()

    def _send(self, message: Message) -> None:
        if self._peer is not None:
            self._peer.send(message)

    # ------------------------------------------------------------------------------------------- coordination

    async def _listen(self, host: str, port: int, token: str, settings: Settings) -> None:
        workers = settings.parallel.pipelines * settings.parallel.stages
        self._server = await serve(self._handle, host, port, token, clients=2 * workers)  # workers and supervisors
        bound = self._server.sockets[0].getsockname()
        # If the name has several addresses, publish the name: other nodes may be able to reach only some of them.
        self._place = Place(host if len(self._server.sockets) > 1 else bound[0], bound[1], identity())

    async def _handle(self, peer: Peer) -> None:
        if self._is_of_another_job(peer.hello):
            if isinstance(peer.hello, SupervisorHello):
                peer.send(NoPlace("another job with the same token has started at the address of this node's job"))
            elif isinstance(peer.hello, CandidateHello):
                async for _ in peer.listen(TO_VOTER):
                    peer.send(OtherJob())
            elif isinstance(peer.hello, OperatorHello):
                with suppress(ChannelClosed):
                    await peer.recv(FROM_OPERATOR)  # a connection that ends with unread bytes may lose the answer
                peer.send(Another())
        elif not isinstance(peer.hello, CandidateHello):
            await self._leadership.admit(peer)
        elif self._leadership.agreement is not None:
            await self._leadership.agreement.handle(peer)

    def _is_of_another_job(self, hello: Message) -> bool:
        """Whether the sender belongs to an earlier job, whose coordinator had the same address, or means that job. The
        sender was suspended while that job ended, or is an operator who gave its run folder."""
        names = SupervisorHello | WorkerHello | CandidateHello | OperatorHello
        known = isinstance(hello, names) and hello.job_id
        return bool(known) and known != self._job_id

    async def _start_host(self, leader: Leader, takeover: Takeover | None) -> Host:
        assert self._settings is not None and self._leadership.agreement is not None
        await asyncio.to_thread(_import_coordinator)
        from recycle_pp.coordinator.checkpoints import NOTHING, newest_whole
        from recycle_pp.coordinator.host import Host
        from recycle_pp.state.replacing import delete_unfinished

        whole = NOTHING
        if self._settings.run.resume and takeover is None:
            whole = await in_thread(newest_whole, self._run.checkpoints, self._settings.checkpoint.store)
            await in_thread(delete_unfinished, self._run.checkpoints)
        if self._launch.one_node:
            self._token_file = await in_time(keep_token, self._run.path, self._token)
        agreement = self._leadership.agreement
        return Host(self._settings, self._run, agreement, leader, self._token, self._job_id, takeover, whole)

    def _disconnect(self) -> None:
        if self._peer is not None:
            self._peer.abort()

    # ----------------------------------------------------------------------------------------------------- end

    async def _handle_signal(self, serving: asyncio.Task[int]) -> int:
        """After a signal, waits until the job has saved and ended, or until this node has left the job. Returns the
        exit code."""
        shutdown = self._shutdown
        host = self._leadership.host
        number = self._shutdown.signal.result()
        self._monitor.stop_starting()
        shutdown.report()
        ends_soon = False
        if self._peer is not None:
            ends_soon = await shutdown.wait_for_answer(serving)
        elif host is not None:
            host.stop(signal.Signals(number).name, 128 + number)
        if self._evicted:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._monitor.gone.wait(), LEAVE_SECONDS)
            if host is not None:  # other nodes may be evicted too, and only this coordinator can end the job cleanly
                await shutdown.wait_for_end(serving)
            if self._launch.local_rank == 0 and not self._finished:
                say("recycle_pp: this node has left the job, which continues without it")
            return 0  # otherwise the launcher would end the node's other ranks
        if ends_soon:
            await shutdown.wait_for_save(serving)
        done = self._finished and serving.done() and serving.result() == 0  # the signal came in the last step
        return 0 if done else 128 + number


def _ignore(message: Message) -> None:
    """Ignores a heartbeat of the coordinator. Any message has already reset the count of unanswered heartbeats."""
