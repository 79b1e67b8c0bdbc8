"""Which process this is, so that another one of the same machine can see for certain that it is dead.

    mine = identity()           # to be sent along
    is_dead(theirs)             # True: that process has ended, and cannot do anything any more
    is_here(theirs)             # whether `is_dead` will say so once it has ended

A port that refuses connections shows no death: a firewall refuses, too. A process id that is gone does, if it was an id
of the same boot of the same kernel, and of the same process namespace: containers have theirs.
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
    """When a process began, in ticks since the boot; "never" of one that has ended and waits for its parent."""
    try:
        # Fields 3 and 22 of proc(5)'s stat; the second one is a name in parentheses, which may hold spaces.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "never"
    except OSError:
        return "unknown"
    return "never" if state in "ZX" else fields[18]
