"""The process that the launcher starts for each rank: it starts the worker, sees it die, and decides nothing.

    code = asyncio.run(supervise(launch, address=None, settings=settings, run=run))   # rank 0: hosts the coordinator
    code = asyncio.run(supervise(launch))                                             # another rank of one node
    code = asyncio.run(supervise(launch, address=Address.of_cluster(...)))            # of several nodes

A supervisor never imports torch: it starts in milliseconds, stays small, and outlives its worker, so that the launcher
sees nothing of a worker's death. What it says to the coordinator and hears from it:

    -> hello      role, rank, host, pid              <- welcome   settings, run_dir
    -> spawned    rank, incarnation, pid             <- spawn     rank, incarnation (after all supervisors have joined)
    -> dying      rank, incarnation, at              <- kill      rank, incarnation (SIGKILL; its death is reported)
    -> died       rank, incarnation, cause,          <- finish    code (ends the supervisor)
                  detail, at, injected, asked
    -> stopping   rank, signal

`dying` comes at once, `died` when the kernel has cleaned up and the cause is known: signal, exception, out_of_memory or
exit. `at` is this node's monotonic clock; `asked` says that a `kill` was on its way; what else the worker's last words
hold comes along. A supervisor that loses the coordinator ends its worker and itself. The job's exit code is that of
each node's first rank; the others return 0, so that the launcher reports one failure instead of all.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from ..settings import Settings
from ..telemetry.run_folder import RunFolder
from .child import Child, Death, WorkerSpec
from .launch import Address, Launch, find, new_token, publish, withdraw
from .messages import Message, Peer, connect

if TYPE_CHECKING:
    from .coordinator import Coordinator

JOIN_SECONDS = 600.0  # for the coordinator to appear: nodes of a cluster do not start together
ASK_SECONDS = 3.0  # after a signal, for the coordinator to end the job in its order
END_SECONDS = 30.0  # for a worker to end by itself when the job is done
TERM_SECONDS = 2.0  # between SIGTERM and SIGKILL


async def supervise(
    launch: Launch, address: Address | None = None, settings: Settings | None = None, run: RunFolder | None = None
) -> int:
    """Runs one rank to the end of the job and returns the exit code of its process.

    address: of the coordinator; None: by the private file of this node. settings, run: rank 0's, which hosts it.
    """
    host = None
    if launch.rank == 0:
        assert settings is not None and run is not None
        try:
            host = Host(launch, settings, run)
            address = await host.start(address)
        except (ValueError, OSError) as error:
            print(f"recycle_pp: {error}", file=sys.stderr)
            return 2
    supervisor = Supervisor(launch, host)
    try:
        return await supervisor.run(address)
    finally:
        supervisor.close()
        if host is not None:
            host.close()


class Host:
    """The coordinator in the loop of rank 0's supervisor."""

    def __init__(self, launch: Launch, settings: Settings, run: RunFolder):
        from ..telemetry.events import Events
        from ..telemetry.progress import Progress
        from .coordinator import Coordinator

        self._launch = launch
        progress = Progress(settings.run.steps, launch.world)
        progress.say(
            f"{launch.world} {'worker starts' if launch.world == 1 else 'workers start'}; run folder {run.path}"
        )
        self._events = Events(run.events, progress.say)
        self._coordinator: Coordinator = Coordinator(settings, run, self._events, progress)

    async def start(self, address: Address | None) -> Address:
        """Binds the port, lets the other ranks find it, and starts to coordinate; ValueError where it cannot."""
        wanted = address or Address("127.0.0.1", 0, new_token())
        try:
            host, port = await self._coordinator.serve(wanted.host, wanted.port, wanted.token)
        except OSError as error:
            at = f"{wanted.host}:{wanted.port}"
            raise ValueError(
                f"control.address must be HOST:PORT of rank 0's node with a free port; {at}: {error.strerror}"
            ) from error
        bound = Address(host, port, wanted.token)
        if address is None and self._launch.world > 1:
            publish(self._launch, bound)
        self._task = asyncio.create_task(self._coordinator.run())
        return bound

    def all_joined(self) -> None:
        withdraw(self._launch)

    def stop(self, reason: str, code: int) -> None:
        self._coordinator.stop(reason, code)

    async def end(self) -> int:
        """The job's exit code. A coordinator that fails says so with its traceback: that is no mistake of the user."""
        try:
            return await self._task
        except Exception:
            traceback.print_exc()
            return 1

    @property
    def ended(self) -> asyncio.Task[int]:
        return self._task

    def close(self) -> None:
        self._task.cancel()
        self._events.close()
        withdraw(self._launch)


class Supervisor:
    """One rank's end of the conversation, and its worker."""

    def __init__(self, launch: Launch, host: Host | None = None, module: str = "recycle_pp.execution.worker"):
        self._launch, self._host, self._module = launch, host, module
        self._peer: Peer | None = None
        self._child: Child | None = None
        self._next: int | None = None  # incarnation to start as soon as the present worker is gone
        self._killed_by_request = False
        self._finished = False  # the coordinator has said so
        self._ending = False  # no worker is started any more
        self._gone = asyncio.Event()  # no worker lives
        self._gone.set()
        self._signal: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self, address: Address | None) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        serving = asyncio.create_task(self._serve(address))
        watched = {serving, self._signal} | ({self._host.ended} if self._host else set())
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        if self._signal.done():
            code = 128 + self._signal.result()
            await self._ask_to_stop(serving)
        elif serving.done():
            code = serving.result()
        else:  # the coordinator ended, and `finish` is on its way, unless it failed
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(serving), 1.0)
            code = serving.result() if serving.done() else 1
        serving.cancel()
        await self._end_worker(gently=code == 0)
        if self._finished and self._launch.local_rank != 0:
            code = 0
        if self._peer is not None:
            self._peer.close()  # by this the coordinator knows that nothing of this rank is left
        if self._host is not None:
            with suppress(TimeoutError):
                ended = await asyncio.wait_for(self._host.end(), END_SECONDS)
                code = code or ended
        return code

    def close(self) -> None:
        """Nothing stays behind, whatever happened."""
        if self._child is not None:
            self._child.send_signal(signal.SIGKILL)
            asyncio.get_running_loop().remove_reader(self._child.pidfd)
            self._child.reap()
            self._child = None

    # ------------------------------------------------------------------------------------------- conversation

    async def _serve(self, address: Address | None) -> int:
        """Does what the coordinator asks until it says `finish`; the exit code."""
        try:
            self._peer, self._address = await self._join(address)
        except (OSError, ValueError) as error:
            print(f"recycle_pp: rank {self._launch.rank} found no coordinator: {error}", file=sys.stderr)
            return 1
        async for message in self._peer:
            if message["type"] == "finish":
                self._finished = True
                return int(message["code"])
            self._obey(message)
        if not self._signal.done():
            where = f"{self._address.host}:{self._address.port}"
            print(f"recycle_pp: rank {self._launch.rank} lost the coordinator at {where} and ends", file=sys.stderr)
        return 1

    async def _join(self, address: Address | None) -> tuple[Peer, Address]:
        rank = self._launch.rank
        hello = {"type": "hello", "role": "supervisor", "rank": rank, "host": socket.gethostname(), "pid": os.getpid()}
        loop = asyncio.get_running_loop()
        deadline = loop.time() + JOIN_SECONDS
        while True:
            place = address or find(self._launch)
            error: OSError = TimeoutError("rank 0 did not say where it is")
            if place is not None:
                try:
                    return await connect(place.host, place.port, place.token, hello), place
                except OSError as failure:
                    error = failure
            if loop.time() > deadline:
                raise error
            await asyncio.sleep(0.02 if address is None else 0.2)

    def _obey(self, message: Message) -> None:
        match message["type"]:
            case "welcome":
                self._settings: dict[str, Any] = message["settings"]
                if self._peer is not None:
                    self._peer.end_after_silence(self._settings["control"]["suspicion"])
                self._run = RunFolder(message["run_dir"])
            case "spawn":
                if self._host is not None:
                    self._host.all_joined()
                self._next = int(message["incarnation"])
                if self._child is None:
                    self._spawn()
                else:
                    self._child.send_signal(signal.SIGKILL)
            case "kill":
                if self._child is not None and self._child.incarnation == int(message["incarnation"]):
                    self._killed_by_request = True
                    self._child.send_signal(signal.SIGKILL)

    def _say(self, type_: str, **fields: Any) -> None:
        if self._peer is not None:
            self._peer.send({"type": type_, "rank": self._launch.rank, **fields})

    # -------------------------------------------------------------------------------------------------- worker

    def _spawn(self) -> None:
        assert self._next is not None
        incarnation, self._next, self._killed_by_request = self._next, None, False
        host, port, token = self._address.host, self._address.port, self._address.token
        spec = WorkerSpec(host, port, token, self._launch.rank, incarnation, str(self._run.path), self._settings)
        try:
            self._run.logs.mkdir(parents=True, exist_ok=True)  # on another node's disk
            self._child = Child.spawn(spec, self._run.log(self._launch.rank), self._module)
        except OSError as error:
            death = Death("exit", f"could not be started: {error}", asyncio.get_running_loop().time())
            self._report(death, incarnation)
            return
        self._gone.clear()
        asyncio.get_running_loop().add_reader(self._child.pidfd, self._on_death)
        watch = partial(self._await_death, self._child, asyncio.get_running_loop())
        threading.Thread(target=watch, name="lifeline", daemon=True).start()
        self._say("spawned", incarnation=incarnation, pid=self._child.pid)

    def _await_death(self, child: Child, loop: asyncio.AbstractEventLoop) -> None:
        at = child.wait()
        with suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            if at is not None:
                loop.call_soon_threadsafe(partial(self._say, "dying", incarnation=child.incarnation, at=at))

    def _on_death(self) -> None:
        child, self._child = self._child, None
        assert child is not None
        asyncio.get_running_loop().remove_reader(child.pidfd)
        death = child.reap()
        self._report(death, child.incarnation)
        if self._next is not None and not self._ending:
            self._spawn()
        else:
            self._gone.set()

    def _report(self, death: Death, incarnation: int) -> None:
        known = {"cause": death.cause, "detail": death.detail, "at": death.at, "injected": death.injected}
        self._say("died", incarnation=incarnation, **{**death.words, **known, "asked": self._killed_by_request})

    # ----------------------------------------------------------------------------------------------------- end

    def _on_signal(self, number: int) -> None:
        # A Ctrl-C reaches us from the terminal and again from torchrun: only the first counts.
        if not self._signal.done():
            self._signal.set_result(number)

    async def _ask_to_stop(self, serving: asyncio.Task[int]) -> None:
        """Lets the coordinator end the job in its own order; it may not be able to any more."""
        number = self._signal.result()
        name = signal.Signals(number).name
        self._ending = True
        self._say("stopping", signal=name)
        if self._host is not None:
            self._host.stop(name, 128 + number)
        if self._peer is not None:
            await asyncio.wait({serving}, timeout=ASK_SECONDS)

    async def _end_worker(self, gently: bool) -> None:
        self._ending = True
        self._next = None
        for number, seconds in ((0, END_SECONDS * gently), (signal.SIGTERM, TERM_SECONDS), (signal.SIGKILL, 60.0)):
            if self._child is not None and number:
                self._child.send_signal(number)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), seconds)
                return
