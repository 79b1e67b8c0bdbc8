"""torch.distributed's backend "recycle": a process group that can be aborted, and rebuilt without its dead members.

    import recycle_pp.comm.torch_backend.process_group                                  # registers the backend
    torch.distributed.init_process_group("recycle", store=store, rank=rank, world_size=size)
    # new_group, DeviceMesh, DTensor, DDP, FSDP2, distributed checkpoints, torch.distributed.pipelining work as usual

    group = torch.distributed.group.WORLD
    group.abort()                                                         # from any thread: blocked operations raise
    group.rebuild(generation, rank, size)                                 # the same object with other members

docs/process-group.md describes the requirements for a program; examples/ddp_survives.py is an example. The trainer
itself uses `recycle_pp.comm.links`, whose TCP transport takes a quarter of the time for small messages, small sums and
new generations (bench/links.py). CPU tensors use Gloo, CUDA tensors NCCL.

`Backend` cannot be subclassed in Python, and torch ignores a second backend in a group. This group therefore owns one
inner group per generation and forwards every operation to the current one. A rebuild gives the group a new rank and
size. A program must then recreate objects that are derived from the group (a DeviceMesh, a sub-group).
"""

from __future__ import annotations

import os
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from recycle_pp.comm.gloo.group import GlooGroup
from recycle_pp.comm.groups import let_go
from recycle_pp.comm.torch_internals import OPERATIONS, nccl_backend, process_group
from recycle_pp.comm.waiting import Generation, LinkBroken
from recycle_pp.linux.addresses import address_of

NAME = "recycle"
POLL_SECONDS = 0.01


class RecycleProcessGroup(dist.ProcessGroup):
    """A process group of backend "recycle".

    store      any store of torch.distributed
    interface  listening address for Gloo; default: the interface in GLOO_SOCKET_IFNAME, else the host name
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, interface: str | None = None):
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._store, self._timeout = store, timeout
        self._interface = address_of(interface) if interface else _default_interface()
        self._group_name = self._group_desc = ""
        self._lock = threading.Lock()
        self._generation = -1
        self._gloo: GlooGroup | None = None
        self._nccl: Any = None
        self._building: Generation | None = None  # the newest generation
        self._inner: Any = None
        self.rebuild(0, rank, size)

    def rebuild(self, generation: int, rank: int, size: int) -> None:
        """Aborts this group and turns it into the group of `generation`. Each member calls `rebuild` with its own rank.

        Blocks until all members have called `rebuild`. Raises LinkBroken if `generation` is not larger than all earlier
        generations, or if `abort` is called meanwhile. Raises RuntimeError if the store times out.
        """
        self.abort()
        with self._lock:
            if generation <= self._generation:
                raise LinkBroken(generation, f"superseded by generation {self._generation}")
            self._generation, self._rank, self._size = generation, rank, size
            self._building = building = Generation(generation)
        seconds = self._timeout.total_seconds()
        gloo = GlooGroup(
            self._store, f"{generation}/cpu", rank, size, torch.device("cpu"), seconds, interface=self._interface
        )
        nccl = None
        if torch.cuda.is_available():
            nccl = nccl_backend(dist.PrefixStore(f"{generation}/cuda", self._store), rank, size, seconds)
        with self._lock:
            if generation == self._generation:
                self._gloo, self._nccl = gloo, nccl
        self._await(gloo, building, seconds)
        gloo.connect(building)
        backends = {"cpu": gloo.gloo} | ({} if nccl is None else {"cuda": nccl})
        inner = process_group(dist.PrefixStore(f"{generation}", self._store), rank, size, backends)
        with self._lock:
            if self._gloo is not gloo:
                raise LinkBroken(generation, "aborted during the rebuild")
            self._inner = inner

    @staticmethod
    def _await(gloo: GlooGroup, building: Generation, seconds: float) -> None:
        """Blocks until all members have called `rebuild`. Polls the store, because `abort` cannot end a blocking call
        of the store."""
        deadline = time.monotonic() + seconds
        while not gloo.complete:
            building.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"generation {building.number}: not all members joined within {seconds:.0f} s")
            time.sleep(POLL_SECONDS)

    def abort(self) -> None:
        """Ends the current generation. Blocked operations raise RuntimeError, and so do later operations until a
        rebuild.

        May be called from any thread, any number of times. The contents of tensors in pending operations are
        undefined."""
        with self._lock:
            gloo, nccl = self._gloo, self._nccl
            old = [self._inner, gloo, nccl]
            self._inner = self._gloo = self._nccl = None
            if self._building is not None:
                self._building.end()
        GlooGroup.abort([] if gloo is None else [gloo])
        if nccl is not None:
            nccl.abort()
        del gloo, nccl  # `let_go` drops the last references
        threading.Thread(target=let_go, args=(old,), name="recycle-close", daemon=True).start()

    def shutdown(self) -> None:
        self.abort()

    # Called from C++ (torch/csrc/distributed/c10d/PyProcessGroup.hpp).

    def getBackendName(self) -> str:
        return NAME

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._size

    def getGroupName(self) -> str:
        return self._group_name

    def setGroupName(self, name: str) -> None:
        self._group_name = name

    def getGroupDesc(self) -> str:
        return self._group_desc

    def setGroupDesc(self, desc: str) -> None:
        self._group_desc = desc

    def _now(self) -> Any:
        inner = self._inner
        if inner is None:
            raise LinkBroken(self._generation, "aborted and not yet rebuilt")
        return inner


def _delegate(name: str) -> Any:
    def operation(self: RecycleProcessGroup, *arguments: Any, **named: Any) -> Any:
        return getattr(self._now(), name)(*arguments, **named)

    operation.__name__ = name
    return operation


for _name in OPERATIONS:
    if hasattr(dist.ProcessGroup, _name):  # torch 2.11 lacks some of the newer names
        setattr(RecycleProcessGroup, _name, _delegate(_name))


def _default_interface() -> str:
    try:
        return address_of(os.environ.get("GLOO_SOCKET_IFNAME") or socket.gethostname())
    except ValueError:
        return "127.0.0.1"  # the machine cannot resolve its own name


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> RecycleProcessGroup:
    return RecycleProcessGroup(store, rank, size, timeout)


dist.Backend.register_backend(NAME, _create, devices=["cpu", "cuda"])
