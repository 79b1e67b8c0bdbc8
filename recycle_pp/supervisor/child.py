"""A worker process, as its supervisor starts it and sees it die, and as the worker itself leaves its last words.

    child = Child.spawn(settings, LogFile(run.log("1.2")))    # in the supervisor: imports everything, and waits
    child.begin(spec)                             # now it is this worker
    child.tell(CoordinatorAt(host, port))         # where the coordinator is now
    child.wait()                                  # in a thread: returns within a millisecond of the death
    child.pidfd                                   # readable when the kernel has cleaned up behind it: then
    death = child.reap()                          # Death(cause="signal", detail="SIGKILL", at=..., injected=True)

    last_words(spec, cause="exception", detail=traceback.format_exc())   # in the worker, before it dies
    last_words(spec, cause="injected", detail="kill@vote")

The worker gets its spec (with the job's token) through a pipe on its standard input, never through its command line or
environment; what it is told later comes the same way, a line of JSON each. It leads a session of its own, so that a
Ctrl-C in the terminal reaches only the supervisor, and dies with its supervisor (PR_SET_PDEATHSIG). A supervisor whose
process has imported torch (tests) forks the worker; a real one, which never does, executes a fresh interpreter.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from recycle_pp.comm.nccl.environment import ENVIRONMENT
from recycle_pp.telemetry.log_file import LogFile
from recycle_pp.wire.messages.supervisors import CoordinatorAt, Death
from recycle_pp.wire.worker_spec import Ahead, LastWords, WorkerSpec

from .lifeline import Lifeline
from .output import Output
from .vital_signs import Board, VitalSigns

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Child:
    """A running worker process."""

    incarnation = -1  # until it begins

    def __init__(self, pid: int, ears: int, words: tuple[int, int], lifeline: Lifeline, output: Output):
        self.pid, self._output = pid, output
        self._ears, self._lifeline = ears, lifeline
        self._died_at: float | None = None
        self.pidfd = os.pidfd_open(pid)
        self.signs = VitalSigns(pid, Board(lifeline.memory))
        self._words, self._words_there = words
        self._oom_kills = _oom_kills()

    @classmethod
    def spawn(cls, settings: Mapping[str, Any], log: LogFile, module: str = "recycle_pp.execution.worker") -> Child:
        """Starts `module` as a process whose standard output and error go to `log`; it imports all that a worker needs,
        and waits for `begin`. Waits for no disk.

        Executed, it runs as `__main__` and calls main(WorkerSpec.read()); forked, the same is called.
        """
        words_end, words_there = os.pipe()
        lifeline = Lifeline.create()
        stdin, spec_end = os.pipe()
        output = Output(log)
        parent = os.getpid()
        sys.stdout.flush(), sys.stderr.flush()  # else a forked child would print our buffers again
        pid = os.fork()
        if pid == 0:
            _become_worker(settings, module, parent, stdin, output.descriptor, (words_there, lifeline.descriptor))
        for descriptor in (stdin, words_there):
            os.close(descriptor)
        output.copy()
        return cls(pid, spec_end, (words_end, words_there), lifeline, output)

    def begin(self, spec: WorkerSpec) -> None:
        """From now on it is this worker."""
        self.incarnation = spec.incarnation
        spec.last_words, spec.lifeline = self._words_there, self._lifeline.descriptor  # its numbers of what it inherits
        self.tell(spec)

    @property
    def ended(self) -> bool:
        """It has died, and can be reaped."""
        return bool(select.select([self.pidfd], [], [], 0.0)[0])

    def tell(self, message: WorkerSpec | Ahead | CoordinatorAt) -> None:
        """One line to its standard input."""
        with suppress(BrokenPipeError):
            os.write(self._ears, msgspec.json.encode(message) + b"\n")  # far below a pipe's 64 KiB: never blocks

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def wait(self) -> float | None:
        """Blocks until it dies, and returns when (time.monotonic()); None if it was reaped before it was a worker."""
        if self._lifeline.wait():
            self._died_at = time.monotonic()
        return self._died_at

    async def stacks(self, seconds: float) -> str:
        """The stacks of its threads, once it has written all of them; "" if it writes nothing in `seconds`."""
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
        """How it ended, once `pidfd` is readable, or `seconds` later; releases everything of the worker and ends what
        it started itself. A killed process whose end the kernel holds up (a dead file system) is left behind."""
        seen = self._died_at or time.monotonic()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # its session; before waitpid, while the number is still ours
        select.select([self.pidfd], [], [], seconds)
        gone, status = os.waitpid(self.pid, os.WNOHANG)
        status = status if gone else signal.SIGKILL
        words = _read_words(self._words)
        self._output.close()
        for descriptor in (self._words, self._ears, self.pidfd):
            os.close(descriptor)
        self._lifeline.close()
        del self.signs  # holds the lifeline's memory
        self.pidfd = -1
        return self._classify(status, words, seen)

    def _classify(self, status: int, words: LastWords | None, seen: float) -> Death:
        where = words.where if words else ""
        if os.WIFSIGNALED(status):
            name = _signal_name(os.WTERMSIG(status))
            if words and words.cause == "injected":
                hung = words.detail.startswith("hang")  # that began long before its kill
                return Death("signal", name, seen if hung else words.at, injected=True)
            if name == "SIGKILL" and _oom_kills() > self._oom_kills:
                return Death("out_of_memory", "SIGKILL by the kernel's out-of-memory killer", seen, where=where)
            return Death("signal", name, seen, where=where)
        if words:
            return Death(words.cause, words.detail, seen, where=where, mistake=words.mistake)
        # A worker that fails before its main function leaves no words, but its output may tell.
        line = self._output.last_line()
        ending = f"; its log ends: {line[:500]}" if line else ""
        return Death("exit", f"exit code {os.WEXITSTATUS(status)}{ending}", seen)


# ------------------------------------------------------------------------------------------------- in the child


def defaults(settings: Mapping[str, Any]) -> dict[str, str]:
    """A worker's environment; the user's own variables override it. One thread; with parallel.backend=nccl also
    `comm.nccl.environment`."""
    environment = {
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # a worker's log records what the worker did, without torch's warnings
    }
    if settings.get("parallel", {}).get("backend") == "nccl":
        environment |= ENVIRONMENT
    interface = settings.get("control", {}).get("interface")
    if interface in (name for _, name in socket.if_nameindex()):
        environment["NCCL_SOCKET_IFNAME"] = f"={interface}"
    return environment


def _become_worker(
    settings: Mapping[str, Any], module: str, parent: int, stdin: int, output: int, inherited: tuple[int, int]
) -> NoReturn:
    """From fork to the worker's main function; never returns to the supervisor's code."""
    status = 1
    try:
        die_with_parent(parent)
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(stdin, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if "torch" not in sys.modules:
            for name, value in defaults(settings).items():
                os.environ.setdefault(name, value)
            for descriptor in inherited:
                os.set_inheritable(descriptor, True)
            os.execv(sys.executable, [sys.executable, "-m", module])
        status = _run_forked(module, inherited)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(Exception):
            sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)


def _run_forked(module: str, inherited: tuple[int, int]) -> int:
    # The supervisor's sockets and its event loop are not ours. They become /dev/null rather than being closed, so that
    # a number cannot be used anew and then be closed when a stale Python object goes.
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:
        if descriptor > 2 and descriptor not in (*inherited, null):
            with suppress(OSError):  # the listing's own
                os.fstat(descriptor)
                os.dup2(null, descriptor, inheritable=False)
    gc.freeze()
    return importlib.import_module(module).main(WorkerSpec.read()) or 0


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Sends this process a signal when the thread of `parent` that started it ends; ends now if it is gone already."""
    if _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


# ------------------------------------------------------------------------------------------------------- causes


def _read_words(descriptor: int) -> LastWords | None:
    """The last whole line that `last_words` wrote to the pipe."""
    os.set_blocking(descriptor, False)
    data = b""
    with suppress(BlockingIOError):  # a grandchild may still hold the other end
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


def _oom_kills() -> int:
    """How many processes of our cgroup (v2) the kernel has killed for want of memory; 0 where it does not say."""
    with suppress(OSError, ValueError, KeyError, StopIteration):
        group = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))[3:]
        text = (Path("/sys/fs/cgroup") / group.lstrip("/") / "memory.events").read_text()
        return int(dict(line.split() for line in text.splitlines())["oom_kill"])
    return 0
