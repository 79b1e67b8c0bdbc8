"""A Gloo group of one generation, with the interface of `comm.groups.Group`.

group = GlooGroup(store, "7/0.1-1.2", rank, size, device, timeout, "127.0.0.1")   # does not wait
group.connect(generation)                                            # waits for every member's address
job = group.backend.send([tensor], peer, tag)                        # also recv and collectives; the job may be dropped
GlooGroup.wait(generation, job)                                      # raises LinkBroken when the generation ends
GlooGroup.abort([group])                                             # from any thread
group.gloo                                                           # torch's own back end
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from recycle_pp.comm.torch_internals import (
    Address,
    address_key,
    answer_for_missing,
    gloo_backend,
    listening_address,
    shutdown_connections,
    start_connections,
)
from recycle_pp.comm.waiting import Generation, Job, Pool


class GlooGroup:
    """A Gloo group that can be aborted. An abort shuts down the group's connections, so that blocked operations of
    `gloo` raise RuntimeError.

    Gloo does not report a connection that breaks in the middle of a message, so separate threads wait for the
    operations of `backend`. At the end of the generation a caller of `wait` continues, even if such a thread stays
    blocked.

    device: unused, because tensors are on the CPU. interface: a numeric address.
    """

    def __init__(
        self,
        store: dist.Store,
        prefix: str,
        rank: int,
        size: int,
        device: torch.device,
        timeout: float,
        interface: str = "127.0.0.1",
    ):
        self._store, self._rank = dist.PrefixStore(prefix, store), rank
        self._keys = [address_key(k) for k in range(size)]
        self.gloo: Any = gloo_backend(self._store, rank, size, interface, timeout)
        self.backend = InThreads(self.gloo)
        self._listener = listening_address(self._store.get(self._keys[rank]))
        self._peers: frozenset[Address] = frozenset()

    @property
    def complete(self) -> bool:
        """Whether every member's address is in the store."""
        return bool(self._store.check(self._keys))

    def connect(self, generation: Generation, pair: bool = False) -> None:
        """Blocks until every member's address is in the store, then starts all connections without waiting."""
        addresses = generation.attempt(lambda: self._store.multi_get(self._keys))
        self._peers = frozenset(map(listening_address, addresses)) - {self._listener}
        if self._peers:
            self._kept = generation.attempt(lambda: start_connections(self.gloo))

    @staticmethod
    def wait(generation: Generation, work: Job) -> None:
        generation.wait(work)

    @staticmethod
    def abort(groups: Sequence[GlooGroup]) -> None:
        for group in groups:
            shutdown_connections(group._listener, group._peers)
            answer_for_missing(group._listener, [k for k in range(len(group._keys)) if k != group._rank])


class InThreads:
    """Operations of a Gloo back end. Each operation has a thread that waits until the operation is done.

    The thread keeps torch's work object and the tensors alive, because dropping the work would cancel its message."""

    _pool = Pool()

    def __init__(self, gloo: Any):
        self._gloo = gloo

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Job:
        return self._hold(self._gloo.send, tensors, to, tag)

    def recv(self, tensors: list[torch.Tensor], frm: int, tag: int) -> Job:
        return self._hold(self._gloo.recv, tensors, frm, tag)

    def allreduce(self, tensors: list[torch.Tensor]) -> Job:
        return self._hold(self._gloo.allreduce, tensors)

    def reduce(self, tensors: list[torch.Tensor], options: dist.ReduceOptions) -> Job:
        return self._hold(self._gloo.reduce, tensors, options)

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> Job:
        return self._hold(self._gloo.broadcast, tensors, options)

    def _hold(self, operation: Callable[..., Any], tensors: list[torch.Tensor], *rest: Any) -> Job:
        work = operation(tensors, *rest)

        def wait() -> list[torch.Tensor]:
            work.wait()
            return tensors

        return self._pool.start(wait)
