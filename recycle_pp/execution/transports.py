"""Selects the transport of a worker's links for the communication backend.

links = Links(transport_for("tcp", store, device, interface="127.0.0.1", size=12, keepalive=10.0))
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from recycle_pp.comm.gloo.group import GlooGroup
from recycle_pp.comm.groups import GroupTransport
from recycle_pp.comm.nccl.group import NcclGroup
from recycle_pp.comm.staging import StagedTransport
from recycle_pp.comm.store import ControlStore
from recycle_pp.comm.tcp.transport import TcpTransport
from recycle_pp.comm.transport import Transport
from recycle_pp.wire.messages.members import Member

HOST = torch.device("cpu")


def transport_for(
    backend: str,
    store: ControlStore,
    device: torch.device,
    interface: str = "127.0.0.1",
    timeout: float = 1800.0,
    size: int | None = None,
    keepalive: float | None = None,
    unreachable: Callable[[list[Member]], None] = lambda members: None,
) -> Transport:
    """The transport for tensors of `device`. With TCP and Gloo, tensors of a GPU go through the host.

    backend      "tcp", "gloo" or "nccl"; raises ValueError for any other value
    store        the workers' shared store, for exchanging their addresses
    interface    address, host name or interface on which TCP and Gloo listen
    timeout      seconds until a Gloo or NCCL operation fails; long, because the coordinator decides about deaths
    size         number of launched processes; TCP needs it to keep connections between survivors when the generation
                 changes (`Links.rebuild`)
    keepalive    seconds without an answer until a TCP connection breaks; None: the kernel's limit
    unreachable  called with members that could not be connected to for `keepalive` seconds; TCP only
    """
    if backend == "nccl":
        return GroupTransport(store, device, timeout, NcclGroup, interface)
    if backend == "gloo":
        on_host: Transport = GroupTransport(store, HOST, timeout, GlooGroup, interface)
    elif backend == "tcp":
        on_host = TcpTransport(store, interface, size, keepalive, unreachable)
    else:
        raise ValueError(f"parallel.backend must be one of tcp, gloo, nccl, not {backend}")
    return on_host if device.type == "cpu" else StagedTransport(on_host, device)
