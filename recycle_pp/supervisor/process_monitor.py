"""Starts the worker process of one rank, sees it die, and ends it.

monitor = ProcessMonitor(module, say)       # say(message): to the coordinator, if there is one
monitor.spawn(order, make_spec, log)        # the coordinator's order, the worker's log; a live worker is ended first
monitor.kill(incarnation); monitor.evict()   # by SIGKILL; by SIGTERM, to hand over
monitor.kill(incarnation, stacks=True)      # the same, once it has said where its threads stand
monitor.signs(most)                         # of the worker, for a heartbeat
monitor.stand_by(settings)                  # the next worker's process starts now, imports and reads all, and waits
await monitor.end(gently=True)              # none is started any more, and the last one has a while to end by itself
monitor.close()                             # nothing is left of it, whatever happened
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

from recycle_pp.telemetry.log_file import LogFile
from recycle_pp.wire.messages.supervisors import CoordinatorAt, Death, Died, Dying, Signs, Spawn, Spawned, Stacks
from recycle_pp.wire.messages.table import Message
from recycle_pp.wire.worker_spec import Ahead, WorkerSpec

from .child import Child

END_SECONDS = 30.0  # for a worker to end by itself when the job is done
STACKS_SECONDS = 1.0  # for a hung worker to write its stacks: within what its death's event waits for its cause
TERM_SECONDS = 2.0  # between SIGTERM and SIGKILL
KILL_SECONDS = 60.0  # after SIGKILL, for the kernel to clean up at the end of a job
KILL_SECONDS_SIGNALLED = 2.0  # the same after a signal: the launcher grants 30 s for everything
REAP_SECONDS = 2.0  # for the kernel to clean up, at the very end; then that is left to init
LOG_SECONDS = 2.0  # for the log's last lines
DEATHS = 20  # that are remembered

MakeSpec = Callable[[int], WorkerSpec]  # of an incarnation


class ProcessMonitor:
    def __init__(self, module: str, say: Callable[[Message], None]) -> None:
        self._module, self._say = module, say
        self.order: Spawn | None = None  # the last one to start a worker
        self.deaths: list[Died] = []
        self.gone = asyncio.Event()  # no worker lives
        self.gone.set()
        self._child: Child | None = None
        self._standby: Child | None = None
        self._dismissed: set[Child] = set()  # killed, and not reaped yet
        self._log: LogFile | None = None  # of the present worker, and of the process that stands by for it
        self._next: Callable[[], None] | None = None  # starts one as soon as the present worker is gone
        self._killed_by_request = False
        self._ending = False
        self._autopsy: asyncio.Task[None] | None = None

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

    def stand_by(self, settings: Mapping[str, Any]) -> bool:
        """The next worker need not import or read anything any more; True if its process has been started just now."""
        if self._child is None or self._standby is not None or self._ending or self._log is None:
            return False
        with suppress(OSError):
            self._standby = Child.spawn(settings, self._log, self._module)
            self._standby.tell(Ahead(dict(settings)))
        return self._standby is not None

    def tell(self, message: CoordinatorAt) -> None:
        if self._child is not None:
            self._child.tell(message)

    def signs(self, most: float) -> Signs | None:
        """Of the worker, if one lives. most: see VitalSigns.look."""
        return None if self._child is None else self._child.signs.look(self._child.incarnation, most)

    def kill(self, incarnation: int, stacks: bool = False) -> None:
        child = self._child
        if child is None or child.incarnation != incarnation:
            return
        self._killed_by_request = True
        if stacks:
            self._autopsy = asyncio.create_task(self._dissect(child))
        else:
            child.send_signal(signal.SIGKILL)

    async def _dissect(self, child: Child) -> None:
        """SIGUSR1 makes it write the stacks of all its threads to its log, if one of them can still run."""
        said = await child.stacks(STACKS_SECONDS)
        child.send_signal(signal.SIGKILL)
        self._say(Stacks(child.incarnation, said))

    def evict(self) -> None:
        if self._child is not None:
            self._child.send_signal(signal.SIGTERM)

    def start_no_more(self) -> None:
        self._ending, self._next = True, None
        self._dismiss()

    async def end(self, gently: bool) -> None:
        self.start_no_more()
        kill = KILL_SECONDS if gently else KILL_SECONDS_SIGNALLED
        for number, seconds in ((0, END_SECONDS * gently), (signal.SIGTERM, TERM_SECONDS), (signal.SIGKILL, kill)):
            if self._child is not None and number:
                self._child.send_signal(number)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.gone.wait(), seconds)
                return

    def close(self) -> None:
        self._dismiss()
        if self._child is not None:
            self._child.send_signal(signal.SIGKILL)
            asyncio.get_running_loop().remove_reader(self._child.pidfd)
            self._dismissed.add(self._child)
            self._child = None
        deadline = time.monotonic() + REAP_SECONDS
        while self._dismissed:
            self._bury(self._dismissed.pop(), max(0.0, deadline - time.monotonic()))
        if self._log is not None:
            self._log.flush(LOG_SECONDS)

    def _start_next(self) -> None:
        start, self._next = self._next, None
        if start is not None and not self._ending:
            start()

    def _start(self, incarnation: int, make_spec: MakeSpec, log: Path) -> None:
        loop = asyncio.get_running_loop()
        self._killed_by_request = False
        try:
            spec = make_spec(incarnation)
            child = self._ready(log)
            self._child = child or Child.spawn(spec.settings, self._open(log), self._module)
            self._child.begin(spec)
        except OSError as error:
            self._report(Death("exit", f"could not be started: {error}", loop.time()), incarnation)
            return
        self.gone.clear()
        loop.add_reader(self._child.pidfd, self._on_death)
        watch = partial(self._await_death, self._child, loop)
        threading.Thread(target=watch, name="lifeline", daemon=True).start()
        self._say(Spawned(incarnation, self._child.pid))

    def _ready(self, log: Path) -> Child | None:
        """The process that stands by, if it lives and has this log: a rank may have another role by now."""
        if self._standby is not None and (self._standby.ended or self._log is None or self._log.path != log):
            self._dismiss()
        child, self._standby = self._standby, None
        return child

    def _open(self, log: Path) -> LogFile:
        if self._log is None or self._log.path != log:
            if self._log is not None:
                self._log.close()
            self._log = LogFile(log)
        return self._log

    def _dismiss(self) -> None:
        """Kills the process that stands by. It is reaped when the kernel has cleaned up: a process that waits for a
        disk ends only when the disk answers."""
        child, self._standby = self._standby, None
        if child is not None:
            child.send_signal(signal.SIGKILL)
            self._dismissed.add(child)
            asyncio.get_running_loop().add_reader(child.pidfd, self._bury, child)

    def _bury(self, child: Child, seconds: float = 0.0) -> None:
        self._dismissed.discard(child)
        asyncio.get_running_loop().remove_reader(child.pidfd)
        child.reap(seconds)

    def _await_death(self, child: Child, loop: asyncio.AbstractEventLoop) -> None:
        at = child.wait()
        with suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            if at is not None:
                loop.call_soon_threadsafe(self._say, Dying(child.incarnation, at))

    def _on_death(self) -> None:
        child, self._child = self._child, None
        assert child is not None
        asyncio.get_running_loop().remove_reader(child.pidfd)
        self._report(child.reap(), child.incarnation)
        self._start_next()
        if self._child is None:
            self.gone.set()

    def _report(self, death: Death, incarnation: int) -> None:
        died = Died(incarnation, death, asked=self._killed_by_request)
        self.deaths = [*self.deaths, died][-DEATHS:]
        self._say(died)
