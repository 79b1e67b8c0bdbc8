"""The NCCL versions and environment variables that recovery requires. Does not import torch, to keep supervisors small.

environment = {**ENVIRONMENT, **os.environ}      # for a worker with parallel.backend=nccl
refuse(installed())                              # raises ValueError if recovery cannot work; one sentence for the user
describe(os.environ, installed())                # "NCCL 2.30.7: NCCL_NVLS_ENABLE=0 ..."
shares_gpus(os.environ, installed())             # whether two workers may use one GPU
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

Version = tuple[int, int, int]

# NCCL's user guide describes these variables under "Environment Variables".
ENVIRONMENT = {
    "NCCL_RUNTIME_CONNECT": "0",  # otherwise each algorithm connects at its first use, in the middle of a step
    "NCCL_NVLS_ENABLE": "0",  # communicators with NVLS cannot be aborted and rebuilt in the same process
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",  # kernels of several communicators start in the order of the host's calls
    "CUDA_MODULE_LOADING": "EAGER",  # a lazy load waits for all running kernels, even one that waits for a peer
}

SHARING: Version = (2, 30, 0)  # first version with NCCL_MULTI_RANK_GPU_ENABLE

# (first version, last version, problem, source). In NCCL 2.31.2 and newer, ncclCommDestroy waits for all ranks
# (pytorch#194679). These versions are allowed, because this project aborts communicators and never destroys them.
BROKEN: tuple[tuple[Version, Version, str, str], ...] = (
    ((0, 0, 0), (2, 18, 99), "an abort is not safe while other threads use NCCL", "nccl#992, pytorch#119215"),
    ((2, 25, 1), (2, 25, 1), "an abort hangs", "pytorch#149153"),
    ((2, 28, 3), (2, 28, 8), "a rebuild in the same process crashes", "NVIDIA Resiliency Extension 0.5"),
)


def refuse(version: Version | None) -> None:
    """Raises ValueError, with one sentence for the user, if recovery does not work with this NCCL version."""
    if version is None:
        raise ValueError("parallel.backend=nccl: libnccl.so.2 (NCCL) is not installed; allowed: auto, tcp, gloo")
    for first, last, wrong, source in BROKEN:
        if first <= version <= last:
            raise ValueError(
                f"parallel.backend=nccl cannot use NCCL {dotted(version)}: {wrong} ({source}); install another "
                "version, or set parallel.backend=tcp"
            )


def describe(environment: Mapping[str, str], version: Version | None) -> str:
    """A log line for the start of a job, with NCCL's version and all variables that affect NCCL."""
    names = {*ENVIRONMENT, *(name for name in environment if name.startswith("NCCL_"))}
    values = [f"{name}={environment[name]}" for name in sorted(names) if name in environment]
    return f"NCCL {dotted(version)}: {' '.join(values)}"


def shares_gpus(environment: Mapping[str, str], version: Version | None) -> bool:
    """Whether several workers may use the same GPU, which is experimental in NCCL. NCCL_MULTI_RANK_GPU_ENABLE=1 enables
    it."""
    return version is not None and version >= SHARING and environment.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def dotted(version: Version | None) -> str:
    return ".".join(map(str, version)) if version else "unknown"


def installed() -> Version | None:
    """The version of the NCCL library in use; None if NCCL is not installed.

    Queries the loaded library. torch would report the version of its build, which LD_PRELOAD may have replaced."""
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError:
        return None
    code = ctypes.c_int()
    if library.ncclGetVersion(ctypes.byref(code)) != 0:
        return None
    return code.value // 10000, code.value // 100 % 100, code.value % 100
