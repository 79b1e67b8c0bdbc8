"""Checks system limits that NCCL may exceed: /dev/shm, open files, locked memory. Does not import torch.

raise_open_files()     # raises the soft limit. Raises ValueError if the hard limit is too small
warnings()             # a warning for the user for each limit that may be too small
free_shared_memory(); open_files(); locked_memory()     # free bytes; (soft, hard) limit; limit in bytes

A small limit is an error only if no communicator could be built with it. Otherwise it causes a warning, because most of
NCCL's needs depend on the connections between GPUs, which only NCCL knows. The values are from NCCL's user guide,
"Runtime and MPI issues".
"""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from math import inf
from pathlib import Path

SHARED_MEMORY = 256 << 20  # bytes; Docker's default is 64 MB, and each pair of GPUs without a direct path takes 10 MB
LOCKED_MEMORY = 1 << 30  # bytes; network cards read and write only locked memory
OPEN_FILES = 4096
COMMUNICATORS = 5  # per worker after a death: one for its stage, and one with each neighbour in two pipelines
LEAST_FILES = 4  # per communicator: two listening sockets, and one socket each to the next and the previous rank
CAP_IPC_LOCK = 14  # capabilities(7): removes the limit on locked memory


def raise_open_files() -> None:
    """Sets the soft limit of open files to the hard limit. Raises ValueError if the hard limit is certainly too
    small."""
    _, hard = open_files()
    used = len(os.listdir("/proc/self/fd"))
    if hard < (need := used + COMMUNICATORS * LEAST_FILES):
        raise ValueError(
            f"parallel.backend=nccl needs at least {need} open files for each worker, and the hard limit is {hard}; "
            f"raise it to {OPEN_FILES} (ulimit -Hn {OPEN_FILES}, docker run --ulimit nofile={OPEN_FILES}), or set "
            "parallel.backend=tcp"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def warnings() -> list[str]:
    return [sentence for sentence in (_shared_memory(), _open_files(), _locked_memory()) if sentence]


def free_shared_memory() -> int:
    """Free bytes in /dev/shm."""
    with suppress(FileNotFoundError):
        about = os.statvfs("/dev/shm")
        return about.f_bavail * about.f_frsize
    return 0


def open_files() -> tuple[int, int]:
    """(soft, hard) limit of open files."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def locked_memory() -> float:
    """Bytes that a process may lock; infinite without a limit. Also infinite if NCCL needs no locked memory, because
    the machine has no InfiniBand or RoCE card or because NCCL must not use the card."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return inf if soft == resource.RLIM_INFINITY or _may_lock() or not _cards() else soft


def _shared_memory() -> str:
    free = free_shared_memory()
    if free >= SHARED_MEMORY:
        return ""
    return (
        f"/dev/shm has {free >> 20} MB left, and NCCL may need {SHARED_MEMORY >> 20} MB there between the GPUs of a "
        "machine; if it fails at the start, enlarge /dev/shm (docker run --shm-size=1g), or allow NUMA calls (docker "
        "run --cap-add SYS_NICE; NCCL 2.24 or newer then needs no /dev/shm)"
    )


def _open_files() -> str:
    _, hard = open_files()
    if hard >= OPEN_FILES:
        return ""
    return (
        f"a worker may open {hard} files, and NCCL may need {OPEN_FILES}, mostly after a worker died; raise the "
        f"limit (ulimit -Hn {OPEN_FILES}, docker run --ulimit nofile={OPEN_FILES})"
    )


def _locked_memory() -> str:
    least = locked_memory()
    if least >= LOCKED_MEMORY:
        return ""
    return (
        f"a worker may lock {least / 1024:.0f} kB of memory, and NCCL may need {LOCKED_MEMORY >> 20} MB for InfiniBand "
        "or RoCE; remove the limit (ulimit -l unlimited, docker run --ulimit memlock=-1), or set NCCL_IB_DISABLE=1"
    )


def _cards() -> list[str]:
    if os.environ.get("NCCL_IB_DISABLE", "0") != "0":
        return []
    with suppress(FileNotFoundError):
        return os.listdir("/sys/class/infiniband")
    return []


def _may_lock() -> bool:
    status = Path("/proc/self/status").read_text()
    effective = status.partition("CapEff:")[2].split()[0]
    return bool(int(effective, 16) >> CAP_IPC_LOCK & 1)
