"""Identifies a process, so that another process on the same machine can prove its death.

    mine = identity()           # sent to peers
    is_dead(theirs)             # True: that process has ended; False: alive or unknown
    is_here(theirs)             # whether `is_dead` can detect the death of that process

A refused connection does not prove a death, because firewalls refuse connections too. A missing process id proves a
death if it was issued by this boot of this kernel, in this process namespace (each container has its own).
"""

from __future__ import annotations

import functools
import os

from recycle_pp.linux.processes import boot_id, pid_namespace, process_stat


@functools.cache
def identity() -> str:
    return f"{_machine()} {os.getpid()} {_started(os.getpid())}"


def is_here(process: str) -> bool:
    return process.rsplit(" ", 2)[0] == _machine()


def is_dead(process: str) -> bool:
    if not is_here(process):
        return False
    pid, started = process.rsplit(" ", 2)[1:]
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return _started(int(pid)) not in (started, "unknown")


def _machine() -> str:
    return f"{boot_id()} {pid_namespace()}"


def _started(pid: int) -> str:
    """Start time of a process in ticks since boot; "never" for a dead or zombie process, "unknown" if unreadable."""
    try:
        stat = process_stat(pid)
    except OSError:
        return "unknown"
    return "never" if stat is None or stat.ended else str(stat.started)
