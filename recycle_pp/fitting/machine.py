"""The memory of this machine and of each worker on it.

gpu_memory()                # bytes of the first GPU; None without one
gpus()                      # bytes of each GPU
memory_of_a_worker("cpu")   # "4.2 GB": the share of one worker, for `parallel.memory=auto`
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress

from recycle_pp.config.sizes import format_size
from recycle_pp.linux.memory import host_memory

DRIVER_SECONDS = 60.0  # limit on nvidia-smi: without persistence mode, the driver starts each GPU anew
SHARE = 0.9  # share of the memory for workers; the rest is for supervisors, drivers and messages


def memory_of_a_worker(device: str, workers_here: int | None = None) -> str | None:
    """The memory of each worker on this machine, as text; None if unknown.

    device: the setting `run.device`
    workers_here: number of workers on this machine; None: LOCAL_WORLD_SIZE, or 1 without it
    """
    gpu = None if device == "cpu" else gpu_memory()
    if gpu is not None:
        return format_size(SHARE * gpu)
    total = host_memory()
    count = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if workers_here is None else workers_here
    return None if total is None else format_size(SHARE * total / count)


def gpu_memory() -> float | None:
    """Bytes of the first GPU, as nvidia-smi reports them; None without a GPU."""
    return next(iter(gpus()), None)


def gpus() -> list[float]:
    """Bytes of each GPU of this machine, as nvidia-smi reports them."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        out = subprocess.run(query, capture_output=True, text=True, timeout=DRIVER_SECONDS, check=True).stdout
        return [float(line) * 2**20 for line in out.splitlines()]
    return []
