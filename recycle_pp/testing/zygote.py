"""The process from which `local_cluster` forks jobs. It has imported all modules of a job and has one thread.

    python -m recycle_pp.testing.zygote DESCRIPTOR FOLDER PRELOAD       # only for `local_cluster.Zygote`

A request on the socket DESCRIPTOR is JSON, with descriptors for the job's output and exit status. For each request the
process forks a launcher. The launcher forks supervisors, as torchrun does, and these fork their workers. When the
socket closes, the process ends all jobs and removes FOLDER. PRELOAD is a Python file that runs first, or "".
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from recycle_pp.linux.processes import die_with_parent

TERM_SECONDS = 10.0  # time for the other supervisors to end after one has failed


@dataclass(frozen=True)
class Part:
    """The ranks of a job that one launcher starts."""

    first: int
    count: int
    world: int  # number of ranks in the whole job
    holder: int | None = None  # id of a process whose namespaces the ranks enter; None: those of the zygote


def _serve(descriptor: int, folder: str, preload: str) -> None:
    """Forks a launcher for every request until the socket closes, then ends all jobs."""
    _preload()
    if preload:
        runpy.run_path(preload)
    gc.collect()
    gc.freeze()  # prevents garbage collection in forked processes from copying all imported objects
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps launchers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and then closes the socket
    launchers = []
    with socket.socket(fileno=descriptor) as requests:
        while True:
            data, descriptors, _, _ = socket.recv_fds(requests, 1 << 16, 2)
            if not data:
                break
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                requests.close()
                _launch(parent, json.loads(data), *descriptors)
            launchers.append(os.pidfd_open(pid))
            requests.send(str(pid).encode())
            for number in descriptors:
                os.close(number)
    for launcher in launchers:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(launcher, signal.SIGKILL)
    for _ in range(50):  # retries, because workers that are still ending may write to the folder
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            break
        time.sleep(0.02)


def _preload() -> None:
    import torch.distributed.checkpoint  # noqa: F401
    from recycle_schedules.compiled import load

    from recycle_pp.config import checks as validation  # noqa: F401
    from recycle_pp.config.compose import compose
    from recycle_pp.coordinator import host  # noqa: F401
    from recycle_pp.execution import worker  # noqa: F401

    compose([])  # makes Hydra look for its plugins here, once, and not in each job
    load()  # loads the compiled code now, because forked processes would lack the thread that loads it


def _launch(parent: int, request: dict[str, Any], output: int, status: int) -> None:
    """Replaces torchrun: starts a supervisor for each rank of the part, and ends the other supervisors when one
    fails."""
    die_with_parent(parent)
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.update(request["environment"])
    part = Part(**request["part"])
    if part.holder is not None:
        _enter(part.holder)
    launcher = os.getpid()
    ranks: dict[int, int] = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: _signal_all(ranks, number))
    for rank in range(part.first, part.first + part.count):
        pid = os.fork()
        if pid == 0:
            os.close(status)
            _supervise(launcher, rank, part, request["arguments"])
        ranks[pid] = rank
    code = 0
    while ranks:
        pid, state = os.wait()
        ranks.pop(pid, None)
        if (failed := os.waitstatus_to_exitcode(state)) and not code:
            code = failed if failed > 0 else 128 - failed
            _signal_all(ranks, signal.SIGTERM)
            signal.signal(signal.SIGALRM, lambda number, frame: _signal_all(ranks, signal.SIGKILL))
            signal.alarm(int(TERM_SECONDS))
    os.write(status, str(code).encode())
    os._exit(0)


def _enter(holder: int) -> None:
    """Enters the namespaces of process `holder`. Only new children enter its process-id namespace, so this process
    forks a child and ends when the child ends. The call returns in the child."""
    descriptor = os.pidfd_open(holder)
    kinds = 0x40000000 | 0x20000000 | 0x00020000 | 0x04000000  # CLONE_NEWNET, NEWPID, NEWNS, NEWUTS: linux/sched.h
    libc = ctypes.CDLL(None, use_errno=True)
    here = os.getcwd()
    if libc.setns(descriptor, kinds) != 0:
        raise OSError(ctypes.get_errno(), f"setns({holder})")
    os.close(descriptor)
    os.chdir(here)
    child = os.fork()
    if child:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: _signal_all({child: 0}, number))
        os.waitpid(child, 0)
        os._exit(0)


def _supervise(launcher: int, rank: int, part: Part, arguments: list[str]) -> None:
    from recycle_pp.train import main

    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: os._exit(128 + number))
        die_with_parent(launcher)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(part.world), MASTER_PORT="0")
        os.environ.update(LOCAL_RANK=str(rank - part.first), LOCAL_WORLD_SIZE=str(part.count))
        code = main(arguments)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _signal_all(pids: Mapping[int, int], number: int) -> None:
    for pid in list(pids):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2], sys.argv[3])
    os._exit(0)  # an orderly shutdown of all imported modules would take a second
