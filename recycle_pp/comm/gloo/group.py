"""One Gloo group of a generation, with the face of `comm.groups.Group`.

group = GlooGroup(store, "7/0.1-1.2", rank, size, device, timeout)   # waits for nobody
group.connect()                                                      # for every member's address
GlooGroup.abort([group])                                             # from any thread
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from recycle_pp.comm.waiting import Generation

from .abort import Address, answer_for_the_missing, gloo_address, shutdown_sockets
from .mesh import MAX_SLOT, gloo_backend


class GlooGroup:
    """One Gloo group, aborted by shutting its sockets: whoever blocks raises, unless in the midst of a message."""

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
        self._keys = [f"0/{k}" for k in range(size)]  # Gloo's own: one device, number 0
        self.backend: Any = gloo_backend(self._store, rank, size, interface, timeout)
        self._listener = gloo_address(self._store.get(self._keys[rank]))
        self._peers: frozenset[Address] = frozenset()

    def connect(self, pair: bool = False) -> list[Any]:
        """Waits for every member's address, then starts all connections (see `Mesh`)."""
        self._peers = frozenset(map(gloo_address, self._store.multi_get(self._keys))) - {self._listener}
        if self._peers:
            self._kick = self.backend.recv_anysource([torch.empty(1, dtype=torch.uint8)], MAX_SLOT)
        return []

    @staticmethod
    def wait(generation: Generation, work: Any) -> None:
        generation.attempt(work.wait)

    @staticmethod
    def abort(groups: Sequence[GlooGroup]) -> None:
        for group in groups:
            shutdown_sockets(group._listener, group._peers)
            answer_for_the_missing(group._listener, [k for k in range(len(group._keys)) if k != group._rank])
