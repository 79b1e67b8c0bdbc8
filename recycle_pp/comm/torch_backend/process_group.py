"""torch.distributed's collectives on groups that can be aborted and rebuilt: the backend "recycle".

    import recycle_pp.comm.torch_backend.process_group                                  # registers the backend
    torch.distributed.init_process_group("recycle", store=store, rank=rank, world_size=size)
    # new_group, DeviceMesh, DTensor, DDP, FSDP2, distributed checkpoints, torch.distributed.pipelining work as usual

    group = torch.distributed.group.WORLD
    group.abort()                                                         # from any thread: what blocks raises
    group.rebuild(generation, rank, size)                                 # the same object, other members

The trainer itself talks through `recycle_pp.comm.links`, which is aborted and rebuilt in less time; this is for
everything else that expects a process group. CPU tensors travel by Gloo, CUDA tensors by NCCL.

`Backend` cannot be subclassed in Python, and a backend registered twice in one group is ignored, so the group owns an
inner group for each generation and hands every operation on. After a rebuild the group's rank and size are the new
ones; what torch has cached about it elsewhere (a DeviceMesh, a sub-group) is made anew by whoever uses it.
"""

from __future__ import annotations

import os
import socket
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from recycle_pp.comm.addresses import address_of
from recycle_pp.comm.gloo.group import GlooGroup
from recycle_pp.comm.groups import let_go
from recycle_pp.comm.nccl.group import NcclGroup
from recycle_pp.comm.waiting import LinkBroken

NAME = "recycle"


class RecycleProcessGroup(dist.ProcessGroup):
    """store: any torch.distributed store. interface: where Gloo listens; by default GLOO_SOCKET_IFNAME, else the host's
    own name.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, interface: str | None = None):
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._store, self._timeout = store, timeout
        self._interface = address_of(interface) if interface else _default_interface()
        self._group_name = self._group_desc = ""
        self._lock = threading.Lock()
        self._generation = -1
        self._gloo: GlooGroup | None = None
        self._nccl: NcclGroup | None = None
        self._inner: Any = None
        self.rebuild(0, rank, size)

    def rebuild(self, generation: int, rank: int, size: int) -> None:
        """Aborts what there is, and connects the members of `generation`. Each calls it with its rank among them.

        Blocks until all have called it. RuntimeError when the store gives up, LinkBroken when it is aborted meanwhile.
        """
        self.abort()
        with self._lock:
            if generation <= self._generation:
                raise LinkBroken(generation, f"superseded by generation {self._generation}")
            self._generation, self._rank, self._size = generation, rank, size
        seconds = self._timeout.total_seconds()
        inner = dist.ProcessGroup(dist.PrefixStore(f"{generation}", self._store), rank, size)
        gloo = GlooGroup(
            self._store, f"{generation}/cpu", rank, size, torch.device("cpu"), seconds, interface=self._interface
        )
        nccl = None
        if torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
            nccl = NcclGroup(self._store, f"{generation}/cuda", rank, size, device, seconds)
        with self._lock:
            if generation == self._generation:
                self._gloo, self._nccl = gloo, nccl
        gloo.connect()
        inner._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo.backend)
        inner._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        if nccl is not None:
            inner._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl.backend)
            inner._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        with self._lock:
            if self._gloo is not gloo:
                raise LinkBroken(generation, "aborted while it was built")
            self._inner = inner

    def abort(self) -> None:
        """Whatever blocks in the present generation raises, and later operations raise LinkBroken until a rebuild."""
        with self._lock:
            old = [self._inner, self._gloo, self._nccl]
            self._inner = self._gloo = self._nccl = None
        NcclGroup.abort([group for group in old if isinstance(group, NcclGroup)])
        GlooGroup.abort([group for group in old if isinstance(group, GlooGroup)])
        threading.Thread(target=let_go, args=(old,), name="recycle-close", daemon=True).start()

    def shutdown(self) -> None:
        self.abort()

    # What C++ asks (torch/csrc/distributed/c10d/PyProcessGroup.hpp).

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
            raise LinkBroken(self._generation, "aborted, and not rebuilt yet")
        return inner


def _delegate(name: str) -> Any:
    def operation(self: RecycleProcessGroup, *arguments: Any, **named: Any) -> Any:
        return getattr(self._now(), name)(*arguments, **named)

    operation.__name__ = name
    return operation


for _name in (
    "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base", "all_gather_single",
    "all_gather_single_coalesced", "allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "all_to_all_single",
    "barrier", "broadcast", "gather", "monitored_barrier", "recv", "recv_anysource", "reduce", "reduce_scatter",
    "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced", "scatter", "send", "_start_coalescing", "_end_coalescing", "_get_backend",
    "_get_sequence_number_for_group", "_set_sequence_number_for_group",
):  # fmt: skip
    if hasattr(dist.ProcessGroup, _name):  # torch 2.11 lacks some of the newer names
        setattr(RecycleProcessGroup, _name, _delegate(_name))


def _default_interface() -> str:
    try:
        return address_of(os.environ.get("GLOO_SOCKET_IFNAME") or socket.gethostname())
    except ValueError:
        return "127.0.0.1"  # a machine that does not know its own name


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> RecycleProcessGroup:
    return RecycleProcessGroup(store, rank, size, timeout)


dist.Backend.register_backend(NAME, _create, devices=["cpu", "cuda"])
