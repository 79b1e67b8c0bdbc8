"""Identifies a process, so that another process on the same machine can prove its death.

    mine = identity()           # sent to peers
    is_dead(theirs)             # True: that process has ended; False: alive or unknown
    is_here(theirs)             # whether `is_dead` can detect its death

A refused connection does not prove a death, because firewalls refuse connections too. A missing process id does, if it
belongs to the same boot of the same kernel and to the same process namespace (each container has its own).
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

from recycle_pp.telemetry.clocks import boot_id


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
    return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"


def _started(pid: int) -> str:
    """Start time of a process in ticks since boot; "never" for a dead or zombie process, "unknown" if unreadable."""
    try:
        # Fields 3 and 22 of proc(5)'s stat. Field 2 is a name in parentheses, which may contain spaces.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "never"
    except OSError:
        return "unknown"
    return "never" if state in "ZX" else fields[18]
