"""One Gloo or NCCL group of one generation: built, used through `backend`, aborted from any thread, buried.

group = GlooGroup(store, "7/world", rank, size, interface="127.0.0.1", timeout=1800.0)   # waits for nobody
group.connect()                                                                # waits for every member's address
group.backend.send([tensor], to, tag)
group.abort()                                                                  # from any thread
"""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

from recycle_pp.comm.abort import Address, answer_for_the_missing, gloo_address, shutdown_sockets

NOBODY_SENDS = 2**31 - 1  # a tag that no message carries


class GlooGroup:
    """Lazy connections, but all of them started at once: neither the constructor nor an operation waits for bystanders.

    Gloo builds its full mesh either in the constructor, one blocking connection after the other, or at the first use of
    each pair, where *posting* a receive blocks until the peer has touched the same pair: a schedule that posts receives
    ahead can then deadlock. `connect` takes the third way: a receive from any source makes Gloo start every connection
    of a lazy group without waiting for one.
    """

    def __init__(self, store: dist.Store, prefix: str, rank: int, size: int, interface: str, timeout: float):
        self.rank, self.size = rank, size
        self._store = store
        self._keys = [f"{prefix}/0/{r}" for r in range(size)]  # Gloo's own: one device, number 0
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=timeout)
        options._threads = 1  # collectives of a group run in order, so that their sum does not depend on luck
        options._devices = [_device(interface)]
        self.backend = ProcessGroupGloo(dist.PrefixStore(prefix, store), rank, size, options)
        self._listener = gloo_address(store.get(self._keys[rank]))
        self._peers: frozenset[Address] = frozenset()
        self._lower: list[int] = []

    def connect(self) -> None:
        """Waits for every member's address (LinkBroken if the generation is abandoned), then starts all connections."""
        addresses = [gloo_address(value) for value in self._store.multi_get(self._keys)]
        self._peers = frozenset(addresses) - {self._listener}
        if self.size > 1:
            self._kick = self.backend.recv_anysource([torch.empty(1, dtype=torch.uint8)], NOBODY_SENDS)  # type: ignore[attr-defined]

    def abort(self) -> None:
        """Breaks whatever is connected or waits to be. What is under way just now may need a second call."""
        if shutdown_sockets(self._listener, self._peers) < self.size - 1:
            self.answer_for_the_missing()

    def answer_for_the_missing(self) -> None:
        """Ends the wait for members that will not connect any more."""
        answer_for_the_missing(self._listener, [rank for rank in range(self.size) if rank != self.rank])


class NcclGroup:
    """The same for GPUs. Written after torch 2.13's `_abort_process_group`; never run by its author.

    Messages between two workers are matched in the order of their calls: tags do not exist.
    """

    def __init__(self, store: dist.Store, prefix: str, rank: int, size: int, device: torch.device, timeout: float):
        self.rank, self.size = rank, size
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout)
        options.config.blocking = 0  # else a communicator whose peer died while it was built cannot be aborted
        self._device = device
        self.backend = dist.ProcessGroupNCCL(dist.PrefixStore(prefix, store), rank, size, options)

    def connect(self) -> None:
        """Builds the communicator now instead of in the first operation."""
        self.backend.eager_connect_single_device(self._device)

    def abort(self) -> None:
        self.backend.abort()


Group = GlooGroup | NcclGroup


def abort_groups(groups: list[Group]) -> None:
    """Aborts several groups; NCCL's within one group call, as one after the other can deadlock (pytorch#119797)."""
    nccl = [group for group in groups if isinstance(group, NcclGroup)]
    if nccl:
        nccl[0].backend._group_start()
    for group in groups:
        group.abort()
    if nccl:
        nccl[0].backend._group_end()


def _device(interface: str) -> ProcessGroupGloo.Device:
    """A listener and an event thread on `interface`: an address, a host name, or a network interface's name."""
    try:
        ipaddress.ip_address(interface)
        named = False
    except ValueError:
        named = interface in (name for _, name in socket.if_nameindex())
    if named:
        return ProcessGroupGloo.create_device(interface=interface, lazy_init=True)
    return ProcessGroupGloo.create_device(hostname=interface, lazy_init=True)
