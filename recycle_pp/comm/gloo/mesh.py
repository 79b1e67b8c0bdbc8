"""Gloo connections that outlive the death of a member: one socket a pair of workers, kept while both of them live.

    mesh = Mesh(rank, size, interface="127.0.0.1", timeout=1800.0)     # waits for nobody
    mesh.address                                                       # bytes: what the other members need
    mesh.link({2: address, 5: address})                                # starts these connections, once
    mesh.linked(2)                                                     # a Job: done when that connection stands
    message = mesh.receive(tensor, 2, slot); message.wait()

A Gloo group is a set of independent pairs. When a member dies, its pairs fail and all others go on, so a death needs no
new group: whoever is left agrees on new slots, and what the old slots still carry arrives in buffers that nobody reads.
Those buffers stay until the mesh is closed: Gloo would stop reading from a connection whose next message has lost its
buffer.

Lazy connections, but all of them started at once. Gloo builds its full mesh either in the constructor, one blocking
connection after the other, or at the first use of each pair, where *posting* a receive blocks until the peer has
touched the same pair: a schedule that posts receives ahead can then deadlock. `link` takes a third way: a receive from
any source makes Gloo start every connection of a lazy group without waiting for one.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo

from recycle_pp.comm.waiting import Job, Pool

from .abort import answer_for_the_missing, end_sockets_after_silence, gloo_address, nowhere, shutdown_sockets

MAX_SLOT = 2**31 - 1  # no message carries it: for receives that only make Gloo connect
UNREAPED = 16  # sends that may wait to be noticed as done


class Mesh:
    """Up to `size` members, of whom any may be missing. timeout: seconds until Gloo gives an operation up."""

    def __init__(self, rank: int, size: int, interface: str, timeout: float, pool: Pool):
        self.rank, self.size = rank, size
        self._pool = pool
        self._store = dist.HashStore()  # Gloo reads its members' addresses here
        self._backend: Any = gloo_backend(self._store, rank, size, interface, timeout)
        self.address: bytes = self._store.get(f"0/{rank}")
        self._listener = gloo_address(self.address)
        self._kick: dist.Work | None = None
        self._links: dict[int, Job] | None = None
        self._peers: set[tuple[str, int]] = set()
        self._works: dict[int, tuple[dist.Work, threading.Lock]] = {}
        self._keys = itertools.count()
        self._sent: deque[int] = deque()

    def link(self, addresses: Mapping[int, bytes]) -> None:
        """Starts the connections to the members at `addresses`, by rank; the others are missing for good. Once."""
        self._peers = {gloo_address(address) for address in addresses.values()}
        missing = nowhere(self.address)
        for rank in range(self.size):
            if rank != self.rank:
                self._store.set(f"0/{rank}", addresses.get(rank, missing))  # type: ignore[arg-type]
        self._kick = self._gloo().recv_anysource([_byte()], MAX_SLOT)
        self._links = {rank: self._pool.start(partial(self._touch, rank)) for rank in addresses}

    @property
    def is_linked(self) -> bool:
        return self._links is not None

    def linked(self, rank: int) -> Job | None:
        """Done when the connection stands (its error, if it failed); None if `link` did not know this member."""
        return None if self._links is None else self._links.get(rank)

    def end_after_silence(self, seconds: float) -> None:
        """Connections that stand break when the other machine has not answered for so long, as after a cut."""
        end_sockets_after_silence(self._listener, self._peers, seconds)

    def send(self, tensor: Tensor, rank: int, slot: int) -> Message:
        """A contiguous tensor, not to be changed until the receiver has it. Whether it has is noticed now and then."""
        message = self._post(self._gloo().send([tensor], rank, slot))
        self._sent.append(message.key)
        if len(self._sent) >= 2 * UNREAPED:
            batch = [self._sent.popleft() for _ in range(UNREAPED)]
            self._pool.start(lambda: self._reap(batch))
        return message

    def receive(self, tensor: Tensor, rank: int, slot: int) -> Message:
        """Into a contiguous tensor of the very size that is sent. It belongs to the mesh until the message is here."""
        return self._post(self._gloo().recv([tensor], rank, slot))

    def close(self) -> None:
        """Breaks all connections and lets go of everything that was under way. Takes tens of milliseconds."""
        shutdown_sockets(self._listener, self._peers)
        answer_for_the_missing(self._listener, [rank for rank in range(self.size) if rank != self.rank])
        self._backend = self._kick = None
        self._works.clear()

    def _gloo(self) -> Any:
        if self._backend is None:
            raise RuntimeError("the mesh is closed")
        return self._backend

    def _touch(self, rank: int) -> None:
        """Returns when the connection stands: only then can a receive be posted."""
        self._post(self._gloo().recv([_byte()], rank, MAX_SLOT))

    def _post(self, work: dist.Work) -> Message:
        key = next(self._keys)
        self._works[key] = work, threading.Lock()
        return Message(self, key)

    def _reap(self, keys: list[int]) -> None:
        """These sends are old: most are done, and waiting for them returns at once."""
        for key in keys:
            Message(self, key).wait()


class Message:
    """A message under way. The mesh owns it: it may be dropped at any time; `wait` returns its memory early."""

    __slots__ = ("_mesh", "key")

    def __init__(self, mesh: Mesh, key: int):
        self._mesh, self.key = mesh, key

    def wait(self) -> None:
        """Blocks in C++ until done; RuntimeError when the connection breaks. Waiting twice is waiting once, also in two
        threads: Gloo wakes one waiter a message, another would wait for ever."""
        works = self._mesh._works
        found = works.get(self.key)
        if found is not None:
            work, waiting = found
            with waiting:
                if self.key in works:
                    work.wait()
                    works.pop(self.key, None)


def gloo_backend(store: dist.Store, rank: int, size: int, interface: str, timeout: float) -> ProcessGroupGloo:
    """A Gloo group with lazy connections: the constructor waits for nobody."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout)
    options._threads = 1  # collectives run in order
    options._devices = [ProcessGroupGloo.create_device(hostname=interface, lazy_init=True)]
    return ProcessGroupGloo(store, rank, size, options)


def _byte() -> Tensor:
    return torch.empty(1, dtype=torch.uint8)
