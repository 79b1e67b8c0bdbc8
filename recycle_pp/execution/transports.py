"""The transport of a worker's links: the one place that knows Gloo from NCCL.

links = Links(transport_for("gloo", store, device, interface="127.0.0.1", workers=everybody, silence=10.0))
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from recycle_schedules import Worker

from recycle_pp.comm.gloo.transport import GlooTransport
from recycle_pp.comm.groups import GroupTransport
from recycle_pp.comm.nccl.group import NcclGroup
from recycle_pp.comm.staging import StagedTransport
from recycle_pp.comm.store import ControlStore
from recycle_pp.comm.transport import Transport


def transport_for(
    backend: str,
    store: ControlStore,
    device: torch.device,
    interface: str = "127.0.0.1",
    timeout: float = 1800.0,
    workers: Sequence[Worker] = (),
    silence: float | None = None,
) -> Transport:
    """Gloo or NCCL for tensors of `device`; with Gloo a GPU's tensors go through the host.

    store: where the workers find each other. backend: "gloo" or "nccl", else ValueError. interface: where Gloo listens
    (address, host name or interface name). timeout: seconds after which an operation fails although nobody is known to
    have died; long, as the coordinator decides about deaths. workers: everybody who may ever be a member, the same list
    everywhere; needed to keep connections over a change of generation (`Links.rebuild`). silence: seconds without an
    answer of the other machine after which a connection of Gloo breaks; None: as long as the kernel tries.
    """
    if backend == "nccl":
        return GroupTransport(store, device, timeout, NcclGroup)
    if backend != "gloo":
        raise ValueError(f"backend: {backend!r} is neither 'gloo' nor 'nccl'")
    gloo = GlooTransport(store, interface, timeout, workers, silence)
    return gloo if device.type == "cpu" else StagedTransport(gloo, device)
