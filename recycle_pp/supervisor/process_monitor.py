"""Starts the worker process of one rank, reports its death, and ends it.

monitor = ProcessMonitor(module, send)      # send(message): to the coordinator, if connected
monitor.spawn(order, make_spec, log)        # at the coordinator's order; kills a live worker first
monitor.kill(incarnation)                   # with SIGKILL
monitor.kill(incarnation, stacks=True)      # the same, after the worker has written its stack traces
monitor.show_stacks(incarnation)            # sends the worker's stack traces; the worker continues
monitor.evict()                             # with SIGTERM, so that the worker can hand over
monitor.bar(death)                          # kills the worker and starts no new one, because its GPU is broken
monitor.bar(death, signal.SIGTERM)          # the same, after the worker has handed over
monitor.signs(max_interval)                 # vital signs of the worker, for a heartbeat
monitor.start_standby(settings)             # prepares the next worker: a fork server, and a process that reads its data
await monitor.end(gently=True)              # starts no more workers; the last one has time to exit by itself
monitor.close()                             # kills every process that is left
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from recycle_pp.telemetry.log_file import LogFile
from recycle_pp.wire.messages.supervisors import CoordinatorAt, Death, Died, Dying, Signs, Spawn, Spawned, Stacks
from recycle_pp.wire.messages.table import Message
from recycle_pp.wire.worker_spec import Ahead, WorkerSpec

from .child import Child
from .fork_server import ForkServer

END_SECONDS = 30.0  # time for a worker to end by itself when the job is done
STACKS_SECONDS = 1.0  # time for a hung worker to write its stack traces; shorter than the wait for a death's cause
TERM_SECONDS = 2.0  # seconds between SIGTERM and SIGKILL
KILL_SECONDS = 60.0  # time for the kernel to clean up after a SIGKILL at the end of a job
KILL_SECONDS_SIGNALLED = 2.0  # the same after a signal to the job, when the launcher grants only 30 s in total
REAP_SECONDS = 2.0  # time for the kernel to clean up at the very end; init reaps processes that take longer
LOG_SECONDS = 2.0  # time for the log's last lines
DEATHS = 20  # number of deaths kept for the next coordinator

MakeSpec = Callable[[int], WorkerSpec]  # incarnation -> spec


class ProcessMonitor:
    def __init__(self, module: str, send: Callable[[Message], None]) -> None:
        self._module = module
        self._send = send
        self.order: Spawn | None = None  # the newest order to start a worker
        self.deaths: list[Died] = []
        self.gone = asyncio.Event()  # set while no worker is alive
        self.gone.set()
        self._child: Child | None = None
        self._server: ForkServer | None = None
        self._standby: Child | None = None
        self._killed: set[Child] = set()  # processes that were killed but are not yet reaped
        self._log: LogFile | None = None  # log of the current worker and of the standby process
        self._next: Callable[[], None] | None = None  # starts the next worker when the current one is dead
        self._killed_by_request = False
        self._barred: Death | None = None  # if set, no worker is started, and this death is reported instead
        self._condemned: Child | None = None  # the worker that `bar` has killed
        self._ending = False
        self._killing: asyncio.Task[None] | None = None
        self._showing: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        return self._child is not None

    def spawn(self, order: Spawn, make_spec: MakeSpec, log: Path) -> None:
        self.order = order
        self._next = partial(self._start, order.incarnation, make_spec, log)
        if self._child is None:
            self._start_next()
        else:
            self._child.send_signal(signal.SIGKILL)

    def start_standby(self, settings: Mapping[str, Any]) -> None:
        """Starts a process in advance, so that the next worker need not import or read anything. The first call starts
        the fork server, which later forks the process."""
        if self._child is None or self._standby or self._ending or self._barred or self._log is None:
            return
        with suppress(OSError):
            if self._server is None or self._server.lost:
                self._server = ForkServer(settings, self._module)
                asyncio.get_running_loop().add_reader(self._server.fileno(), self._server_is_ready, settings)
            else:
                self._standby = Child.spawn(settings, self._log, self._module, self._server)
                self._standby.send(Ahead(dict(settings)))

    def _server_is_ready(self, settings: Mapping[str, Any]) -> None:
        assert self._server is not None and self._log is not None
        asyncio.get_running_loop().remove_reader(self._server.fileno())
        if problem := self._server.listen():
            self._log.write(
                f"supervisor: standby processes cannot be forked, so each imports by itself: {problem}\n".encode()
            )
        self.start_standby(settings)

    def send_to_worker(self, message: CoordinatorAt) -> None:
        if self._child is not None:
            self._child.send(message)

    def signs(self, max_interval: float) -> Signs | None:
        """Vital signs of the worker, if it is alive. max_interval: see VitalSigns.sample."""
        return None if self._child is None else self._child.vital_signs(max_interval)

    def kill(self, incarnation: int, stacks: bool = False) -> None:
        child = self._child
        if child is None or child.incarnation != incarnation:
            return
        self._killed_by_request = True
        if stacks:
            self._killing = asyncio.create_task(self._kill_with_stacks(child))
        else:
            child.send_signal(signal.SIGKILL)

    async def _kill_with_stacks(self, child: Child) -> None:
        """Lets the worker write its stack traces (SIGUSR1), if any of its threads can still run, and then kills it."""
        said = await child.stacks(STACKS_SECONDS)
        child.send_signal(signal.SIGKILL)
        self._send(Stacks(child.incarnation, said))

    def show_stacks(self, incarnation: int) -> None:
        self._showing = asyncio.create_task(self._show_stacks(incarnation))

    async def _show_stacks(self, incarnation: int) -> None:
        child = self._child
        text = await child.stacks(STACKS_SECONDS) if child is not None and child.incarnation == incarnation else ""
        self._send(Stacks(incarnation, text, shown=True))

    def evict(self) -> None:
        if self._child is not None:
            self._child.send_signal(signal.SIGTERM)

    def bar(self, death: Death, number: int = signal.SIGKILL) -> None:
        """Sends signal `number` to the worker, if there is one. Answers later orders to start a worker with `death`.

        death: the reason why no worker may run here. If the signal is SIGKILL, this is also reported as the worker's
        death."""
        self._barred = death
        self._end_preparations()
        if self._child is not None:
            if number == signal.SIGKILL:
                self._condemned = self._child
            self._child.send_signal(number)

    def stop_starting(self) -> None:
        self._ending = True
        self._next = None
        self._end_preparations()

    async def end(self, gently: bool) -> None:
        self.stop_starting()
        kill = KILL_SECONDS if gently else KILL_SECONDS_SIGNALLED
        for number, seconds in ((0, END_SECONDS * gently), (signal.SIGTERM, TERM_SECONDS), (signal.SIGKILL, kill)):
            if self._child is not None and number:
                self._child.send_signal(number)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.gone.wait(), seconds)
                return

    def close(self) -> None:
        self._end_preparations()
        if self._child is not None:
            self._child.send_signal(signal.SIGKILL)
            asyncio.get_running_loop().remove_reader(self._child.pidfd)
            self._killed.add(self._child)
            self._child = None
        deadline = time.monotonic() + REAP_SECONDS
        while self._killed:
            self._reap(self._killed.pop(), max(0.0, deadline - time.monotonic()))
        if self._log is not None:
            self._log.flush(LOG_SECONDS)

    def _start_next(self) -> None:
        start = self._next
        self._next = None
        if start is not None and not self._ending:
            start()

    def _start(self, incarnation: int, make_spec: MakeSpec, log: Path) -> None:
        loop = asyncio.get_running_loop()
        self._killed_by_request = False
        if self._barred is not None:
            self._report(replace(self._barred, at=loop.time()), incarnation)
            return
        try:
            spec = make_spec(incarnation)
            child = self._take_standby(log)
            self._child = child or Child.spawn(spec.settings, self._open(log), self._module, self._server)
            self._child.assign(spec)
        except OSError as error:
            self._report(Death("exit", f"could not be started: {error}", loop.time()), incarnation)
            return
        self.gone.clear()
        loop.add_reader(self._child.pidfd, self._on_death)
        watch = partial(self._await_death, self._child, loop)
        threading.Thread(target=watch, name="lifeline", daemon=True).start()
        self._send(Spawned(incarnation, self._child.pid))

    def _take_standby(self, log: Path) -> Child | None:
        """The standby process, if it can become the worker; otherwise kills it and returns None.

        It cannot if it has ended, is suspended, or writes to another log because the rank has become another worker. If
        it is not prepared yet, it may be waiting for a disk. A new fork is then faster, but a new interpreter is not.
        """
        child = self._standby
        if child is None:
            return None
        prepared = child.prepared or self._server is None or not self._server.usable
        if child.ended or child.suspended or not prepared or self._log is None or self._log.path != log:
            self._kill_standby()
            return None
        self._standby = None
        return child

    def _open(self, log: Path) -> LogFile:
        if self._log is None or self._log.path != log:
            if self._log is not None:
                self._log.close()
            self._log = LogFile(log)
        return self._log

    def _end_preparations(self) -> None:
        self._kill_standby()
        if self._server is not None and self._server.fileno() != -1:
            asyncio.get_running_loop().remove_reader(self._server.fileno())
            self._server.close()

    def _kill_standby(self) -> None:
        """Kills the standby process. It is reaped later, because a process that waits for a disk cannot exit before the
        disk answers."""
        child = self._standby
        self._standby = None
        if child is not None:
            child.send_signal(signal.SIGKILL)
            self._killed.add(child)
            asyncio.get_running_loop().add_reader(child.pidfd, self._reap, child)

    def _reap(self, child: Child, seconds: float = 0.0) -> None:
        self._killed.discard(child)
        asyncio.get_running_loop().remove_reader(child.pidfd)
        child.reap(seconds)

    def _await_death(self, child: Child, loop: asyncio.AbstractEventLoop) -> None:
        at = child.wait()
        with suppress(RuntimeError):  # the loop is closed
            if at is not None:
                loop.call_soon_threadsafe(self._send, Dying(child.incarnation, at))

    def _on_death(self) -> None:
        child = self._child
        self._child = None
        assert child is not None
        asyncio.get_running_loop().remove_reader(child.pidfd)
        death = child.reap()
        if child is self._condemned and self._barred is not None:
            death = replace(self._barred, at=death.at)
        self._condemned = None
        self._report(death, child.incarnation)
        self._start_next()
        if self._child is None:
            self.gone.set()

    def _report(self, death: Death, incarnation: int) -> None:
        died = Died(incarnation, death, asked=self._killed_by_request)
        self.deaths = [*self.deaths, died][-DEATHS:]
        self._send(died)
