"""The device that a worker computes on, the back end of its messages, and what its results depend on.

device = choose(settings.run.device, rank)                  # ValueError: one sentence for the user
backend = backend_for(settings.parallel.backend, device)     # tcp | gloo | nccl
platform(device, backend)                                   # "NVIDIA H200 sm_90, 132 SMs, ..., nccl 2.30.7"
notes(settings.parallel.backend, backend, device)            # sentences for the user
settle_memory(device)                                       # waits until the memory of a dead process is free
is_unfit(error)                                             # whether no worker can run a kernel on this machine
finish = finisher(device); finish()                         # waits for the work that this thread has launched
large_blocks_apart()                                        # malloc returns large blocks to the system when freed,
give_back_free_memory()                                     # and with this call all free memory
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import torch

from recycle_pp.comm.nccl import environment as nccl

SETTLE_SECONDS = 10.0  # at most, for the driver to free the memory of a dead process
SHARED_MEMORY = 256 << 20  # bytes of /dev/shm; Docker gives 64 MB
SETTLED_SECONDS = 0.5  # without growth of the free memory
M_MMAP_THRESHOLD = -3  # malloc.h


def choose(wanted: str, rank: int) -> torch.device:
    """For `run.device`: the node's GPUs in turn, by the launcher's LOCAL_RANK. It becomes the current one."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and not count):
        return torch.device("cpu")
    if not count:
        raise ValueError("run.device=cuda needs a GPU, and torch finds none on this machine; allowed: auto, cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)) % count)
    torch.cuda.set_device(device)
    return device


def backend_for(wanted: str, device: torch.device) -> str:
    """The back end for `parallel.backend`. auto is TCP, through the host's memory on a GPU.

    ValueError, one sentence for the user: nccl is asked for and cannot be used. It takes one worker a GPU, or several
    where `nccl.shares_gpus`."""
    if wanted == "auto":
        return "tcp"
    if wanted == "nccl":
        if device.type != "cuda":
            raise ValueError("parallel.backend=nccl needs a GPU for each worker; allowed here: auto, tcp, gloo")
        found = nccl_version()
        nccl.refuse(os.environ, found)
        workers, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if workers > gpus and not nccl.shares_gpus(os.environ, found):
            raise ValueError(
                f"parallel.backend=nccl needs a GPU for each worker: a node has {gpus} for {workers}; set "
                "parallel.backend=tcp, or NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL 2.30 or newer (this is "
                f"{nccl.dotted(found)})"
            )
    return wanted


def notes(wanted: str, backend: str, device: torch.device) -> list[str]:
    """Sentences about the back end that the user should read at the start, the same on all workers."""
    if backend == "nccl":
        return [nccl.describe(os.environ, nccl_version()), *_shared_memory()]
    if wanted == "auto" and device.type == "cuda":
        return [
            "parallel.backend=auto: messages between GPUs go by TCP through the host's memory. NCCL is faster and has "
            "not been tried on GPUs yet; parallel.backend=nccl selects it"
        ]
    return []


def _shared_memory() -> list[str]:
    """A warning if NCCL may lack the memory through which the GPUs of a machine exchange tensors."""
    about = os.statvfs("/dev/shm")
    if about.f_bavail * about.f_frsize >= SHARED_MEMORY:
        return []
    return [
        f"/dev/shm has less than {SHARED_MEMORY >> 20} MB left, and NCCL uses it between the GPUs of a machine; if it "
        "fails at the start, enlarge /dev/shm (docker run --shm-size=1g)"
    ]


def settle_memory(device: torch.device) -> None:
    """Blocks until the free memory of the GPU grows no longer: the driver frees the memory of a killed process some
    time after its death, and its successor would run out of memory. SETTLE_SECONDS at most."""
    if device.type != "cuda":
        return
    begin = grew = time.monotonic()
    most = 0
    while (now := time.monotonic()) - grew < SETTLED_SECONDS and now - begin < SETTLE_SECONDS:
        free, _ = torch.cuda.mem_get_info(device)
        if free > most:
            most, grew = free, now
        time.sleep(0.05)


def nccl_version() -> nccl.Version | None:
    """Of the NCCL in use, None without one."""
    if (found := nccl.installed()) is not None:
        return found
    with suppress(AttributeError, RuntimeError, ValueError):  # linked into torch, or not there
        major, minor, patch = torch.cuda.nccl.version()[:3]
        return major, minor, patch
    return None


def finisher(device: torch.device) -> Callable[[], None]:
    """What waits until the device has done all that this thread asked it for; a CPU always has."""
    if device.type != "cuda":
        return lambda: None
    return lambda: torch.cuda.current_stream(device).synchronize()


def large_blocks_apart() -> None:
    """From now on blocks of 1 MiB have pages of their own (mallopt(3)): by itself glibc lets that size grow to 32 MiB,
    and what it keeps of smaller ones, in each thread, lies beside what is in use."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)


def give_back_free_memory() -> None:
    """Of the host (malloc_trim(3)): milliseconds, and the pages are new ones when they are used again."""
    ctypes.CDLL(None).malloc_trim(0)


def is_unfit(error: Exception) -> bool:
    """A kernel cannot be compiled for this device, does not fit it, or is not in torch's build for it."""
    return type(error).__module__.startswith("triton.") or "no kernel image is available" in str(error)


def platform(device: torch.device, backend: str, precision: str = "fp32") -> str:
    """What the bits of a result depend on beside its operands: kernels, their tiles, matrix libraries and the order of
    reductions follow from it. Workers with different platforms could not replace each other."""
    models = f", transformers {version('transformers')}" if "transformers" in sys.modules else ""
    messages = f"nccl {nccl.dotted(nccl_version())}" if backend == "nccl" else backend
    chip = _gpu(device) if device.type == "cuda" else _cpu(precision)
    return f"{chip}{models}, torch {torch.__version__}, {messages}"


def _cpu(precision: str) -> str:
    chip = f"cpu {torch.backends.cpu.get_cpu_capability()}"
    if precision == "bf16":  # its products are computed by what the processor has for it, not by torch's own loops
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
    """The version that cuBLASLt itself returns, which may not be the one in torch's requirements; or "unknown"."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(f"libcublasLt.so.{str(torch.version.cuda).partition('.')[0]}")
        library.cublasLtGetVersion.restype = ctypes.c_size_t
        return str(library.cublasLtGetVersion())
    return "unknown"


def _attention() -> str:
    """The back ends that `scaled_dot_product_attention` may choose from, by shape and dtype: "flash+efficient+math"."""
    allowed = {
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(),
    }
    return "+".join(name for name, enabled in allowed.items() if enabled)
