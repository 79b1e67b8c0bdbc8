"""The environment variables and versions of NCCL that recovery requires. Imports no torch, so supervisors stay light.

environment = {**ENVIRONMENT, **os.environ}      # for a worker with parallel.backend=nccl
refuse(os.environ, installed())                  # ValueError if recovery cannot work; one sentence for the user
describe(os.environ, installed())                # "NCCL 2.30.7: NCCL_NVLS_ENABLE=0 ..."
shares_gpus(os.environ, installed())             # whether two workers may use one GPU
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

Version = tuple[int, int, int]

NONBLOCKING_SECONDS = 30  # longest time to build a communicator, during which it holds a lock that an abort needs

# By default torch's NCCL threads end a process whose communicator fails. A minute later they also end the processes of
# all its peers, although the job has continued without the dead worker. In this project the coordinator decides which
# workers end, so torch's threads must not. The names are from torch's NCCLUtils.hpp and from NCCL's user guide,
# "Environment Variables".
ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # otherwise the watchdog throws, which ends the process
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # otherwise CUDA errors end it without a message; the main thread sees them
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # otherwise a monitor of the watchdog may abort the process
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_FR_BUFFER_SIZE": "0",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(NONBLOCKING_SECONDS),  # seconds until a communicator must be ready
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",  # messages of a pair are deliberately serialized
    "NCCL_RUNTIME_CONNECT": "0",  # otherwise each algorithm connects when it is first used, in the middle of a step
    "NCCL_NVLS_ENABLE": "0",  # communicators with NVLS cannot be aborted and rebuilt in the same process
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",  # kernels of several communicators start in the order of the host's calls
    "CUDA_MODULE_LOADING": "EAGER",  # a lazy load waits for all running kernels, even one that waits for a peer
}

# If one of these is set, the monitor threads of dozens of groups poll the workers' store.
FORBIDDEN = ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_PROPAGATE_ERROR")

SHARING: Version = (2, 30, 0)  # first version with NCCL_MULTI_RANK_GPU_ENABLE

# (first version, last version, problem, source). In NCCL 2.31.2 and newer ncclCommDestroy waits for all ranks
# (pytorch#194679). These versions are allowed, because this project aborts communicators and never destroys them.
BROKEN: tuple[tuple[Version, Version, str, str], ...] = (
    ((0, 0, 0), (2, 18, 99), "an abort is not safe beside other threads", "nccl#992, pytorch#119215"),
    ((2, 25, 1), (2, 25, 1), "an abort hangs", "pytorch#149153"),
    ((2, 28, 3), (2, 28, 8), "a rebuild in the same process crashes", "NVIDIA Resiliency Extension 0.5"),
)


def refuse(environment: Mapping[str, str], version: Version | None) -> None:
    """ValueError, with one sentence for the user, if this version or these variables would prevent the workers from
    surviving a death."""
    if version is None:
        raise ValueError("parallel.backend=nccl needs NCCL, and torch was built without it; allowed: auto, tcp, gloo")
    for first, last, wrong, source in BROKEN:
        if first <= version <= last:
            raise ValueError(
                f"parallel.backend=nccl cannot use NCCL {dotted(version)}: {wrong} ({source}); install another one, "
                "or set parallel.backend=tcp"
            )
    for name in FORBIDDEN:
        if environment.get(name, "0") not in ("0", ""):
            raise ValueError(
                f"{name}={environment[name]} cannot be used with parallel.backend=nccl: torch would poll the workers' "
                "store from each communicator; unset it, or set parallel.backend=tcp"
            )


def describe(environment: Mapping[str, str], version: Version | None) -> str:
    """A line for the log at the start of a job: NCCL's version, and all variables that concern NCCL."""
    names = {*ENVIRONMENT, *(name for name in environment if name.startswith(("NCCL_", "TORCH_NCCL_")))}
    values = [f"{name}={environment[name]}" for name in sorted(names) if name in environment]
    return f"NCCL {dotted(version)}: {' '.join(values)}"


def shares_gpus(environment: Mapping[str, str], version: Version | None) -> bool:
    """Whether several workers may use the same GPU. This is experimental in NCCL; NCCL_MULTI_RANK_GPU_ENABLE=1 enables
    it."""
    return version is not None and version >= SHARING and environment.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def dotted(version: Version | None) -> str:
    return ".".join(map(str, version)) if version else "unknown"


def installed() -> Version | None:
    """The version of the NCCL library in use; None if there is none.

    Asks the loaded library. torch would report the version of its build, which LD_PRELOAD may have replaced."""
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError:
        return None
    code = ctypes.c_int()
    if library.ncclGetVersion(ctypes.byref(code)) != 0:
        return None
    return code.value // 10000, code.value // 100 % 100, code.value % 100
