"""The memory of this machine and of each worker on it.

gpu_memory(workers=8)       # bytes of a worker's share of its GPU; None without one
gpus()                      # bytes of each GPU that workers may use
memory_of_a_worker("cpu")   # "4.2 GB": the share of one worker, for `parallel.memory=auto`
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress

from recycle_pp.config.sizes import format_size
from recycle_pp.linux.memory import host_memory

DRIVER_SECONDS = 60.0  # time limit for nvidia-smi: without persistence mode, the driver first starts each GPU
SHARE = 0.9  # share of the memory for workers; the rest is for supervisors, drivers and messages


def memory_of_a_worker(device: str, workers_here: int | None = None) -> str | None:
    """The memory of each worker on this machine, as text; None if unknown.

    device: the setting `run.device`
    workers_here: number of workers on this machine; None: LOCAL_WORLD_SIZE, or 1 without it
    """
    count = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if workers_here is None else workers_here
    gpu = None if device == "cpu" else gpu_memory(count)
    if gpu is not None:
        return format_size(SHARE * gpu)
    total = host_memory()
    return None if total is None else format_size(SHARE * total / count)


def gpu_memory(workers: int = 1) -> float | None:
    """Bytes of a worker's share of its GPU, on the smallest GPU that workers may use; None without one.

    workers: number of workers on this machine. If there are fewer GPUs, workers share GPUs (`execution.device.choose`)
    """
    found = gpus()
    return min(found) / math.ceil(workers / len(found)) if found else None


def gpus() -> list[float]:
    """Bytes of each GPU that CUDA_VISIBLE_DEVICES allows, as nvidia-smi reports them. A slice of a GPU (MIG) counts as
    the smallest whole one."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=uuid,memory.total", "--format=csv,noheader,nounits"]
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        out = subprocess.run(query, capture_output=True, text=True, timeout=DRIVER_SECONDS, check=True).stdout
        rows = (line.split(",") for line in out.splitlines())
        return _visible({uuid: float(size) * 2**20 for uuid, size in rows})
    return []


def _visible(found: Mapping[str, float]) -> list[float]:
    """The values of the GPUs that CUDA_VISIBLE_DEVICES names. found: UUID -> value, in the order of PCI addresses."""
    values = list(found.values())
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return values
    visible: list[float] = []
    for name in (name.strip() for name in chosen.split(",")):
        if name.isdigit():
            own = values[int(name) :][:1]
        elif name.startswith("MIG-"):
            own = sorted(values)[:1]
        else:
            own = [value for uuid, value in found.items() if name and uuid.startswith(name)]
        if len(own) != 1:  # CUDA ignores an invalid name and all names after it
            break
        visible += own
    return visible
