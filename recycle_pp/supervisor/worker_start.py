"""The child's side of a fork that starts a worker.

become_worker(module, supervisor, descriptors)      # imports the module and calls its start(); never returns
say_prepared()                                      # in a standby process that only waits for its spec
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from recycle_pp.comm.nccl.environment import ENVIRONMENT
from recycle_pp.linux.processes import die_with_parent

# A worker's descriptors after standard input, output and error: the pipe for its last words, and the lifeline.
WORDS, LIFELINE = 3, 4


def default_environment(settings: Mapping[str, Any]) -> dict[str, str]:
    """Defaults for a worker's environment variables: one thread, NVML's order of the GPUs and, with
    parallel.backend=nccl, the variables of `comm.nccl.environment`. Variables that the user has set take precedence."""
    environment = {
        "OMP_NUM_THREADS": "1",
        # NVML's order. With CUDA's default order, fastest first, `health.nvml` would watch another GPU.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # keeps torch's warnings out of the worker's log
    }
    if settings.get("parallel", {}).get("backend") == "nccl":
        environment |= ENVIRONMENT
    interface = settings.get("control", {}).get("interface")
    if interface in (name for _, name in socket.if_nameindex()):
        environment["NCCL_SOCKET_IFNAME"] = f"={interface}"
    return environment


def become_worker(
    module: str, parent: int, descriptors: Sequence[int], settings: Mapping[str, Any] | None = None
) -> NoReturn:
    """The child's side of a fork: runs the worker and exits.

    module       see `Child.spawn`
    parent       process id of the supervisor, which is the parent
    descriptors  become the standard input, output and error, and the descriptors WORDS and LIFELINE
    settings     the job's settings; if given and torch is not imported, the process becomes a fresh interpreter
    """
    status = 1
    try:
        die_with_parent(parent)
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        # Copy to high numbers first, so that none is overwritten before it has been copied.
        copies = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, LIFELINE + 1) for number in descriptors]
        for target, copied in enumerate(copies):
            os.dup2(copied, target)
        if settings is not None and "torch" not in sys.modules:
            for name, value in default_environment(settings).items():
                os.environ.setdefault(name, value)
            os.execv(sys.executable, [sys.executable, "-m", module])
        status = _run_forked(module)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(Exception):
            sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)


def say_prepared() -> None:
    """Signals to the supervisor that this standby process can become the worker at once (`Child.prepared`)."""
    with suppress(OSError):
        os.write(WORDS, b"\n")  # an empty line, which does not count as last words


def _run_forked(module: str) -> int:
    # Inherited sockets and the event loop belong to the parent. Their descriptors are redirected to /dev/null, not
    # closed: otherwise a stale Python object would later close a new file that reuses the descriptor's number.
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:
        if descriptor > LIFELINE and descriptor != null:
            with suppress(OSError):  # already closed: listdir's own descriptor
                os.fstat(descriptor)
                os.dup2(null, descriptor, inheritable=False)
    gc.freeze()
    return importlib.import_module(module).start() or 0
