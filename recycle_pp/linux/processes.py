"""Reads the state of processes from /proc (proc(5)), and configures this process with prctl(2).

process_stat(pid).started                # identifies a process uniquely, together with the pid and `boot_id()`
process_stat(pid, thread=pid).cpu_ticks  # processor time of the main thread alone
run_delay(pid, thread=pid)               # seconds for which that thread had to wait for a core
process_size(pid)                        # ProcessSize(mib=310.2, threads=14, descriptors=31)
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Literal, NamedTuple

Self = Literal["self"]
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_libc = ctypes.CDLL(None, use_errno=True)


class ProcessStat(NamedTuple):
    """The state of a process, or of one of its threads.

    state      R, S, D, T, Z, ...
    cpu_ticks  user and system time, in clock ticks
    started    clock ticks from the boot to the start of the process
    """

    state: str
    cpu_ticks: int
    started: int

    @property
    def ended(self) -> bool:
        """Whether the process has ended. Its entry in /proc exists until the parent has waited for it."""
        return self.state in "ZX"

    @property
    def suspended(self) -> bool:
        """Whether a signal such as SIGSTOP, or a debugger, has stopped it."""
        return self.state in "Tt"


class ProcessSize(NamedTuple):
    mib: float  # resident memory
    threads: int
    descriptors: int


def process_stat(pid: int, thread: int | None = None) -> ProcessStat | None:
    """The state of a process, or of one of its threads; None if there is no such process. Raises OSError if
    unreadable."""
    path = f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat"
    try:
        text = Path(path).read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = text.rpartition(")")[2].split()  # the second field, a name in parentheses, may contain spaces
    return ProcessStat(state, int(fields[10]) + int(fields[11]), int(fields[18]))


def started_at(pid: int) -> float | None:
    """The time at which a process has started, as by `time.time()`; None if there is no such process."""
    stat = process_stat(pid)
    if stat is None:
        return None
    up = stat.started / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + up


def run_delay(pid: int, thread: int) -> float:
    """Total seconds in which a thread was ready to run but had no core. Raises OSError if there is no such thread, or
    if the kernel does not report it."""
    return int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[1]) / 1e9


def thread_states(pid: int) -> dict[int, str]:
    """Thread -> its state (`ProcessStat`), for all threads of a process; {} if there is no such process."""
    try:
        threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except FileNotFoundError:
        return {}
    stats = {thread: process_stat(pid, thread) for thread in threads}
    return {thread: stat.state for thread, stat in stats.items() if stat is not None}


def process_status(pid: int | Self = "self") -> dict[str, str]:
    """The lines of /proc/PID/status: name -> text. Raises OSError if there is no such process."""
    lines = (line.partition(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {name: value.strip() for name, _, value in lines}


def memory_of(name: str, pid: int | Self = "self") -> int:
    """Bytes in the line `name` of /proc/PID/status: VmRSS, VmHWM, RssAnon, ...

    Raises OSError or KeyError if the process has ended."""
    return int(process_status(pid)[name].split()[0]) * 1024


def process_size(pid: int) -> ProcessSize:
    """The resources that a process uses. Raises OSError or KeyError if the process has ended."""
    threads = int(process_status(pid)["Threads"])
    descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    return ProcessSize(memory_of("VmRSS", pid) / 2**20, threads, descriptors)


def parent_of(pid: int) -> int:
    """The id of a process's parent. Raises OSError if there is no such process."""
    return int(process_status(pid)["PPid"])


def children_of(pid: int) -> list[int]:
    """The ids of the children that the main thread of a process started, oldest first; [] if there is no such
    process."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def boot_id() -> str:
    """A random id of this boot of the kernel. It is the same in all containers of a machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def name_process(name: str) -> None:
    """Sets the name of this process for `ps` and `top` (prctl(2), PR_SET_NAME: 15 characters)."""
    _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Makes the kernel send signal `number` to this process when the thread that forked this process ends. Exits if
    process `parent` has already ended."""
    if _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


def pid_namespace(pid: int | Self = "self") -> str:
    """The process-id namespace of a process. Each container has its own. Raises OSError if unreadable."""
    return os.readlink(f"/proc/{pid}/ns/pid")
