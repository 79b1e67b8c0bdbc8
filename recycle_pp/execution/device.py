"""Selects the device and communication backend of a worker, and describes what determines the bits of its results.

device = choose(settings.run.device, rank)                  # raises ValueError with one sentence for the user
backend = backend_for(settings.parallel.backend, device)     # tcp | gloo | nccl
platform(device, backend)                                   # "NVIDIA H200 sm_90, 132 SMs, ..., nccl 2.30.7"
notes(settings.parallel.backend, backend, device)            # sentences for the user
settle_memory(device)                                       # waits until the memory of a dead process is free
free_bytes(device)                                          # memory that could be allocated now
is_unfit(error)                                             # whether the error means that a kernel cannot run
memory_used(device)                                           # (peak, reserved) bytes of this process
finish = finisher(device); finish()                         # waits for all work that this thread has launched
large_blocks_apart()                                        # makes malloc unmap large blocks when they are freed
give_back_free_memory()                                     # returns all free memory to the system
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import torch

from recycle_pp.comm.nccl import environment as nccl
from recycle_pp.comm.nccl import limits
from recycle_pp.linux.memory import free_memory
from recycle_pp.telemetry.words import plural

SETTLE_SECONDS = 10.0  # maximum wait for the driver to free the memory of a dead process
SETTLED_SECONDS = 0.5  # the wait ends when the free memory has not grown for this time
M_MMAP_THRESHOLD = -3  # malloc.h


def choose(wanted: str, rank: int) -> torch.device:
    """The device that `run.device` selects. A GPU's number is LOCAL_RANK modulo the number of GPUs of the node.

    Makes the GPU the current device of all threads.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and not count):
        return torch.device("cpu")
    if not count:
        raise ValueError("run.device=cuda: torch finds no GPU on this machine; allowed: auto, cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)) % count)
    _use_in_all_threads(device)
    return device


def _use_in_all_threads(device: torch.device) -> None:
    """Makes the GPU the current device of this thread and of all threads that start later. By default a thread uses GPU
    0. It would create a context of some 100 MB there, or launch a kernel there for another GPU's memory."""
    torch.cuda.set_device(device)
    run = threading.Thread.run

    def on_device(thread: threading.Thread) -> None:
        torch.cuda.set_device(device)
        run(thread)

    threading.Thread.run = on_device  # type: ignore[method-assign, assignment]


def backend_for(wanted: str, device: torch.device) -> str:
    """The communication backend that `parallel.backend` selects. `auto` selects TCP, even for GPUs.

    Raises ValueError with one sentence for the user if nccl cannot be used. nccl needs a GPU for each worker, unless
    `nccl.shares_gpus` is true."""
    if wanted == "auto":
        return "tcp"
    if wanted == "nccl":
        if device.type != "cuda":
            raise ValueError("parallel.backend=nccl needs a GPU for each worker; allowed here: auto, tcp, gloo")
        found = nccl.installed()
        nccl.refuse(found)
        workers, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if workers > gpus and not nccl.shares_gpus(os.environ, found):
            raise ValueError(
                f"parallel.backend=nccl needs a GPU for each worker: this node has {plural(gpus, 'GPU')} for "
                f"{plural(workers, 'worker')}; set parallel.backend=tcp, or NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL "
                f"2.30 or newer (this is {nccl.dotted(found)})"
            )
        limits.raise_open_files()
    return wanted


def notes(wanted: str, backend: str, device: torch.device) -> list[str]:
    """Sentences for the user about the communication backend. If several workers return the same sentence, the
    coordinator prints it only once, at the start."""
    if backend == "nccl":
        # With several nodes, machine_checks.quick warns about the limits.
        one_node = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
        return [nccl.describe(os.environ, nccl.installed()), *(limits.warnings() if one_node else [])]
    if wanted == "auto" and device.type == "cuda":
        return [
            "parallel.backend=auto: GPUs communicate by TCP through host memory. NCCL is faster, but its recovery is "
            "not tested on GPUs yet; parallel.backend=nccl selects it"
        ]
    return []


def settle_memory(device: torch.device) -> None:
    """Blocks until the free memory of the GPU stops growing, for at most SETTLE_SECONDS. The driver frees the
    memory of a killed process with a delay, so a worker that restarts at once could run out of memory."""
    if device.type != "cuda":
        return
    begin = grew = time.monotonic()
    most = 0
    while (now := time.monotonic()) - grew < SETTLED_SECONDS and now - begin < SETTLE_SECONDS:
        free, _ = torch.cuda.mem_get_info(device)
        if free > most:
            most, grew = free, now
        time.sleep(0.05)


def finisher(device: torch.device) -> Callable[[], None]:
    """A function that waits until the device has finished this thread's work. On a CPU it does nothing."""
    if device.type != "cuda":
        return lambda: None
    return lambda: torch.cuda.current_stream(device).synchronize()


def large_blocks_apart() -> None:
    """Makes malloc allocate blocks of 1 MiB or more in their own pages (mallopt(3)). By default glibc raises this
    threshold to as much as 32 MiB. Smaller blocks stay in a thread's heap after they are freed."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)


def give_back_free_memory() -> None:
    """Returns free memory of the host to the system (malloc_trim(3)). Takes milliseconds. Later allocations cost page
    faults."""
    ctypes.CDLL(None).malloc_trim(0)


def free_bytes(device: torch.device) -> int:
    """Memory that this process could allocate on the device now."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    free = free_memory()
    return sys.maxsize if free is None else int(free)


def is_unfit(error: Exception) -> bool:
    """Whether the error means that a kernel cannot be compiled for this device, does not fit it, or is missing in this
    torch build."""
    return type(error).__module__.startswith("triton.") or "no kernel image is available" in str(error)


def memory_used(device: torch.device) -> tuple[int, int]:
    """(peak, reserved) bytes of this process since its start, on the device.

    On a GPU, these are the peaks of the memory in tensors and of the memory that torch has reserved for tensors. On a
    CPU, `peak` is the peak of the process's physical memory, including Python and torch, and `reserved` is 0.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0


def platform(device: torch.device, backend: str, precision: str = "fp32") -> str:
    """The hardware and versions that determine the bits of a result. They select the kernels, their tiles, the matrix
    libraries and the order of reductions. Workers with different platforms cannot replace each other."""
    models = f", transformers {version('transformers')}" if "transformers" in sys.modules else ""
    messages = f"nccl {nccl.dotted(nccl.installed())}" if backend == "nccl" else backend
    chip = _gpu(device) if device.type == "cuda" else _cpu(precision)
    return f"{chip}{models}, torch {torch.__version__}, {messages}"


def _cpu(precision: str) -> str:
    chip = f"cpu {torch.backends.cpu.get_cpu_capability()}"
    if precision != "fp32":  # results then depend on the processor's bf16 instructions
        chip += " bf16" * torch.cpu._is_avx512_bf16_supported() + " amx" * torch.cpu._is_amx_tile_supported()
    return chip


def _gpu(device: torch.device) -> str:
    about = torch.cuda.get_device_properties(device)
    return (
        f"{about.name} sm_{about.major}{about.minor}, {about.multi_processor_count} SMs, driver {_driver()}, "
        f"cuBLAS {_cublas()}, attention {_attention()}, triton {version('triton')}"
    )


def _driver() -> str:
    """The version of the kernel module: "580.95.05", or "unknown"."""
    with suppress(OSError, IndexError):
        line = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
        return next((word for word in line.split() if "." in word and word.replace(".", "").isdigit()), "unknown")
    return "unknown"


def _cublas() -> str:
    """The version that cuBLASLt itself reports, or "unknown". It may differ from the version that torch requires."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(f"libcublasLt.so.{str(torch.version.cuda).partition('.')[0]}")
        library.cublasLtGetVersion.restype = ctypes.c_size_t
        return str(library.cublasLtGetVersion())
    return "unknown"


def _attention() -> str:
    """The backends that `scaled_dot_product_attention` may select by shape and dtype: "flash+efficient+math"."""
    allowed = {
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(),
    }
    return "+".join(name for name, enabled in allowed.items() if enabled)
