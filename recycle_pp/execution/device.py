"""Which device a worker computes on, how it talks to others from there, and what it must have in common with them.

device = choose(settings.run.device, rank)                  # ValueError: one sentence for the user
backend = backend_for(settings.parallel.backend, device)     # tcp | gloo | nccl
platform(device, backend)                                   # "NVIDIA H200 sm_90, triton 3.6.0, torch 2.11.0, nccl"
is_unfit(error)                                             # of a first launch: no worker can run this here
finish = finisher(device); finish()                         # the device has done what this thread asked it for
large_blocks_apart()                                         # malloc gives large blocks back when they are freed,
give_back_free_memory()                                      # and with this all that it keeps for later
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from importlib.metadata import version

import torch

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
    """The backend for `parallel.backend`: auto is NCCL where each worker of the node has a GPU of its own, else TCP.

    ValueError, one sentence for the user, where NCCL is asked for and cannot be: it takes one rank a GPU."""
    workers, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if wanted == "nccl" and workers > gpus:
        raise ValueError(
            f"parallel.backend=nccl needs a GPU for each worker: a node has {gpus} for {workers}; "
            "allowed: auto, tcp, gloo"
        )
    if wanted != "auto":
        return wanted
    return "nccl" if device.type == "cuda" and workers <= gpus else "tcp"


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
    """What the bits of a result depend on beside its operands. Workers that differ in it could not stand in for each
    other: kernels, their tiles, the matrix libraries and the order of a reduction are chosen by it."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        chip = f"{torch.cuda.get_device_name(device)} sm_{major}{minor}, triton {version('triton')}"
    else:
        chip = f"cpu {torch.backends.cpu.get_cpu_capability()}"
        if precision == "bf16":  # its products are computed by what the processor has for it, not by torch's own loops
            chip += " bf16" * torch.cpu._is_avx512_bf16_supported() + " amx" * torch.cpu._is_amx_tile_supported()
    models = f", transformers {version('transformers')}" if "transformers" in sys.modules else ""
    return f"{chip}{models}, torch {torch.__version__}, {backend}"
