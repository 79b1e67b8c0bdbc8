"""Starts a worker process, detects its death and finds the cause.

    child = Child.spawn(settings, LogFile(run.log("1.2")))    # the process imports all modules and waits
    child.assign(spec)                            # the process becomes this worker
    child.send(CoordinatorAt(host, port))         # new address of the coordinator
    child.wait()                                  # in a thread: returns within a millisecond of the death
    child.pidfd                                   # readable once the kernel has cleaned up; then:
    death = child.reap()                          # Death(cause="signal", detail="SIGKILL", at=..., injected=True)

    last_words(spec, cause="exception", detail=traceback.format_exc())   # in the worker, before it dies
    last_words(spec, cause="injected", detail="kill@vote")

The worker receives its spec, which contains the job's token, through a pipe on its standard input, never on its command
line or in its environment. Later messages use the same pipe, one line of JSON each. The worker leads its own session,
so Ctrl-C in the terminal reaches only the supervisor. It dies with its supervisor (PR_SET_PDEATHSIG). A supervisor
never imports torch, so it starts the worker in a fresh interpreter or has a `ForkServer` fork it. In tests the
supervisor has imported torch, and the worker is a plain fork.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from recycle_pp.linux.descriptors import readable
from recycle_pp.linux.memory import oom_kills
from recycle_pp.linux.processes import process_stat
from recycle_pp.telemetry.log_file import LogFile
from recycle_pp.wire.messages.supervisors import CoordinatorAt, Death, Signs
from recycle_pp.wire.worker_spec import Ahead, LastWords, WorkerSpec

from .fork_server import ForkServer
from .lifeline import Lifeline
from .output import Output
from .vital_signs import Board, VitalSigns
from .worker_start import LIFELINE, WORDS, become_worker

# Seconds between readings of the out-of-memory killer's count of kills. A SIGKILL is attributed to the killer if the
# count has risen since the reading before the last.
OOM_SECONDS = 1.0


class Child:
    """A running worker process."""

    incarnation = -1  # until `assign`

    def __init__(self, pid: int, stdin: int, words: int, lifeline: Lifeline, output: Output):
        self.pid = pid
        self._output = output
        self._stdin = stdin
        self._lifeline = lifeline
        self._died_at: float | None = None
        self.pidfd = os.pidfd_open(pid)
        self.signs = VitalSigns(pid, Board(lifeline.memory))
        self._words = words
        self._noted = time.monotonic()
        self._oom_kills = [oom_kills()] * 2  # the last two readings, oldest first

    @classmethod
    def spawn(
        cls,
        settings: Mapping[str, Any],
        log: LogFile,
        module: str = "recycle_pp.execution.worker",
        server: ForkServer | None = None,
    ) -> Child:
        """Starts `module` as a process that imports everything a worker needs, then waits for `assign`.

        The standard output and error of the process go to `log`. A fork of `server` or of this process imports the
        module and calls its start(). If neither can be forked, a fresh interpreter runs the module as `__main__`. Never
        waits for a disk, and waits for the server at most `fork_server.ANSWER_SECONDS`.
        """
        words, inherited_words = os.pipe()
        lifeline = Lifeline.create()
        stdin, spec_end = os.pipe()
        output = Output(log)
        parent = os.getpid()
        descriptors = (stdin, output.descriptor, output.descriptor, inherited_words, lifeline.descriptor)
        pid = None if server is None else server.fork(descriptors)
        if pid is None:
            sys.stdout.flush(), sys.stderr.flush()  # otherwise a forked child would print these buffers again
            pid = os.fork()
            if pid == 0:
                become_worker(module, parent, descriptors, settings)
        for descriptor in (stdin, inherited_words):
            os.close(descriptor)
        output.copy()
        return cls(pid, spec_end, words, lifeline, output)

    def assign(self, spec: WorkerSpec) -> None:
        """Makes the process the worker that `spec` describes."""
        self.incarnation = spec.incarnation
        self._oom_kills = [oom_kills()] * 2  # read again, because a standby process may have waited for hours
        spec.last_words, spec.lifeline = WORDS, LIFELINE
        self.send(spec)

    def vital_signs(self, max_interval: float) -> Signs:
        """The vital signs of the process, as `VitalSigns.sample`. Call it at every heartbeat."""
        if self._died_at is None and time.monotonic() > self._noted + OOM_SECONDS:
            self._noted = time.monotonic()
            self._oom_kills = [self._oom_kills[1], oom_kills()]
        return self.signs.sample(self.incarnation, max_interval)

    @property
    def ended(self) -> bool:
        """Whether the process is dead and can be reaped."""
        return readable(self.pidfd)

    @property
    def suspended(self) -> bool:
        stat = process_stat(self.pid)
        return stat is not None and stat.suspended

    @property
    def prepared(self) -> bool:
        """Whether a standby process has imported and read everything (`worker_start.say_prepared`)."""
        return readable(self._words)

    def send(self, message: WorkerSpec | Ahead | CoordinatorAt) -> None:
        """Writes one line to the standard input of the process."""
        with suppress(BrokenPipeError):
            os.write(self._stdin, msgspec.json.encode(message) + b"\n")  # never blocks: a pipe has room for 64 KiB

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def wait(self) -> float | None:
        """Blocks until the process dies. Returns the time.monotonic() of its death; None if it was reaped before
        `assign`."""
        if self._lifeline.wait():
            self._died_at = time.monotonic()
        return self._died_at

    async def stacks(self, seconds: float) -> str:
        """The stack traces of all threads of the process; "" if the process writes none within `seconds`."""
        before = seen = self._output.received
        self.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            await asyncio.sleep(0.05)
            if seen == self._output.received > before:
                break
            seen = self._output.received
        return self._output.since(before).decode(errors="replace")

    def reap(self, seconds: float = 0.0) -> Death:
        """Waits until `pidfd` is readable, at most `seconds`, and returns how the process died. Kills the children of
        the process and releases its resources.

        If a killed process waits for a file system that does not answer, it is not reaped and stays behind.
        """
        seen = self._died_at or time.monotonic()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # the worker's session, before waitpid frees the process id
        readable(self.pidfd, seconds)
        gone, status = os.waitpid(self.pid, os.WNOHANG)
        status = status if gone else signal.SIGKILL
        words = _read_words(self._words)
        self._output.close()
        for descriptor in (self._words, self._stdin, self.pidfd):
            os.close(descriptor)
        self._lifeline.close()
        del self.signs  # because its board would keep the lifeline's memory mapped
        self.pidfd = -1
        return self._classify(status, words, seen)

    def _classify(self, status: int, words: LastWords | None, seen: float) -> Death:
        where = words.where if words else ""
        if os.WIFSIGNALED(status):
            name = _signal_name(os.WTERMSIG(status))
            if words and words.cause == "injected":
                hung = words.detail.startswith("hang")  # `words.at` is then the beginning of the hang
                return Death("signal", name, seen if hung else words.at, injected=True)
            if name == "SIGKILL" and oom_kills() > self._oom_kills[0]:
                return Death("out_of_memory", "SIGKILL by the kernel's out-of-memory killer", seen, where=where)
            return Death("signal", name, seen, where=where)
        if words:
            return Death(words.cause, words.detail, seen, where=where, mistake=words.mistake)
        # A worker that fails before its main function sends no last words, but its output may show the cause.
        line = self._output.last_line()
        ending = f"; its log ends: {line[:500]}" if line else ""
        return Death("exit", f"exit code {os.WEXITSTATUS(status)}{ending}", seen)


# ------------------------------------------------------------------------------------------------------- causes


def _read_words(descriptor: int) -> LastWords | None:
    """The last complete line that `last_words` wrote to the pipe; None if there is none."""
    os.set_blocking(descriptor, False)
    data = b""
    with suppress(BlockingIOError):  # no more data, although a grandchild still has the other end open
        while chunk := os.read(descriptor, 1 << 16):
            data += chunk
    for line in reversed(data.split(b"\n")[:-1]):
        with suppress(msgspec.MsgspecError, ValueError):
            return msgspec.json.decode(line, type=LastWords)
    return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
