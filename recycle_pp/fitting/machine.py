"""The memory of this machine, its container and its GPU.

host_memory()               # bytes for all processes of this machine; None if unknown
gpu_memory()                # bytes of the first GPU; None without one
memory_of_a_worker("cpu")   # "4.2 GB": the share of one worker, for `parallel.memory=auto`
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from recycle_pp.config.sizes import format_size

SHARE = 0.9  # of the memory is for workers; the rest is for supervisors, drivers and messages


def memory_of_a_worker(device: str, workers_here: int | None = None) -> str | None:
    """The memory of each worker of this machine, as text; None if unknown.

    device: `run.device`. workers_here: default LOCAL_WORLD_SIZE, or 1.
    """
    gpu = None if device == "cpu" else gpu_memory()
    if gpu is not None:
        return format_size(SHARE * gpu)
    total = host_memory()
    count = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if workers_here is None else workers_here
    return None if total is None else format_size(SHARE * total / count)


def host_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Bytes of the machine, or the lowest limit of this process's control groups (cgroup v1 or v2) if that is lower."""
    found = [bytes_ for bytes_ in (_total(proc), *_limits(proc, groups)) if bytes_ is not None]
    return min(found, default=None)


def gpu_memory() -> float | None:
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    with suppress(OSError, ValueError, IndexError, subprocess.SubprocessError):
        out = subprocess.run(query, capture_output=True, text=True, timeout=5, check=True).stdout
        return float(out.splitlines()[0]) * 2**20
    return None


def _total(proc: Path) -> float | None:
    with suppress(OSError, ValueError, IndexError):
        return int((proc / "meminfo").read_text().split()[1]) * 1024.0
    return None


def _limits(proc: Path, groups: Path) -> Iterator[float]:
    """The limits of this process's groups up to the root. A container may see its own group as the root."""
    lines: list[str] = []
    with suppress(OSError):
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (groups / "memory", "memory.limit_in_bytes") if controllers else (groups, "memory.max")
        inside = Path(group.strip("/"))
        for folder in (root / inside, *(root / above for above in inside.parents), root):
            with suppress(OSError, ValueError):  # "max": no limit
                yield float((folder / name).read_text())
