"""Links over groups that are built anew in each generation: NCCL, and Gloo to try the same code without a GPU.

Two groups a worker, all members and its stage. Rendezvous is the control store, seen from C++ under "<generation>/".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from recycle_schedules import Worker
from torch import Tensor

from recycle_pp.comm.abort import Address, LinkBroken, answer_for_the_missing, gloo_address, shutdown_sockets
from recycle_pp.comm.mesh import MAX_SLOT, gloo_backend
from recycle_pp.comm.store import ControlStore
from recycle_pp.comm.waiting import Generation, Pending


class NcclGroup:
    """One NCCL communicator. Messages between two workers match in the order of their calls: there are no tags."""

    def __init__(self, store: dist.Store, prefix: str, rank: int, size: int, device: torch.device, timeout: float):
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout)
        options.config.blocking = 0  # else a communicator cannot be aborted while a member is missing
        self._device = device
        self.backend: Any = dist.ProcessGroupNCCL(dist.PrefixStore(prefix, store), rank, size, options)

    def connect(self) -> None:
        """Builds the communicator now instead of in the first operation."""
        self.backend.eager_connect_single_device(self._device)

    @staticmethod
    def abort(groups: Sequence[NcclGroup]) -> None:
        """All within one group call: one after the other can deadlock (pytorch#119797)."""
        if groups:
            groups[0].backend._group_start()
            for group in groups:
                group.backend.abort()
            groups[0].backend._group_end()


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

    def connect(self) -> None:
        """Waits for every member's address, then starts all connections (see `Mesh`)."""
        self._peers = frozenset(map(gloo_address, self._store.multi_get(self._keys))) - {self._listener}
        if self._peers:
            self._kick = self.backend.recv_anysource([torch.empty(1, dtype=torch.uint8)], MAX_SLOT)

    @staticmethod
    def abort(groups: Sequence[GlooGroup]) -> None:
        for group in groups:
            shutdown_sockets(group._listener, group._peers)
            answer_for_the_missing(group._listener, [k for k in range(len(group._keys)) if k != group._rank])


class GroupTransport:
    """`kind` is the class of the groups. The generation's number is all that they share with those before."""

    def __init__(self, store: ControlStore, device: torch.device, timeout: float, kind: Any = NcclGroup):
        self._store, self._device, self._timeout, self._kind = store, device, timeout, kind
        self._groups: dict[int, Groups] = {}
        self._closing: list[threading.Thread] = []

    def join(self, generation: Generation, members: Sequence[Worker], me: Worker, base: int) -> None:
        peers = [worker for worker in members if worker.stage == me.stage]
        groups = self._groups[generation.number] = Groups(list(members), peers)
        with self._store.one_message():
            groups.world = self._make(f"{generation.number}/world", groups.members, me)
            groups.stage = self._make(f"{generation.number}/stage{me.stage}", groups.peers, me)
        for group in (groups.world, groups.stage):
            if group is not None:
                group.connect()

    def send(self, generation: Generation, tensor: Tensor, to: Worker, tag: int) -> Pending:
        groups = self._of(generation)
        return self._run(generation, lambda: [groups.world.backend.send([tensor], groups.members.index(to), tag)])

    def receive(self, generation: Generation, tensor: Tensor, frm: Worker, tag: int) -> Pending:
        groups = self._of(generation)
        return self._run(generation, lambda: [groups.world.backend.recv([tensor], groups.members.index(frm), tag)])

    def all_reduce(self, generation: Generation, tensors: Sequence[Tensor]) -> Pending:
        stage = self._of(generation).stage
        return self._run(generation, lambda: [stage.backend.allreduce([t]) for t in tensors if stage is not None])

    def broadcast(self, generation: Generation, tensors: Sequence[Tensor], source: Worker) -> Pending:
        groups = self._of(generation)
        options = dist.BroadcastOptions()
        options.rootRank = groups.peers.index(source)
        stage = groups.stage
        return self._run(
            generation, lambda: [stage.backend.broadcast([t], options) for t in tensors if stage is not None]
        )

    def barrier(self, generation: Generation) -> Pending:
        world = self._of(generation).world
        token = torch.zeros(1, device=self._device)
        return self._run(generation, lambda: [world.backend.allreduce([token])] if world is not None else [])

    def end(self, over: Sequence[Generation]) -> None:
        for generation in over:
            self._store.abandon(generation.number)
        ended = [self._groups.pop(generation.number) for generation in over if generation.number in self._groups]
        groups = [group for each in ended for group in each.take()]
        self._kind.abort(groups)
        self._closing = [thread for thread in self._closing if thread.is_alive()]
        self._closing.append(threading.Thread(target=let_go, args=(groups,), name="recycle-close", daemon=True))
        self._closing[-1].start()

    def close(self, timeout: float) -> None:
        for thread in self._closing:
            thread.join(timeout)

    def _make(self, prefix: str, workers: list[Worker], me: Worker) -> Any:
        if len(workers) == 1:
            return None
        return self._kind(self._store, prefix, workers.index(me), len(workers), self._device, self._timeout)

    def _of(self, generation: Generation) -> Groups:
        groups = self._groups.get(generation.number)
        if groups is None:
            raise LinkBroken(generation.number, "aborted")
        return groups

    def _run(self, generation: Generation, start: Callable[[], list[Any]]) -> Pending:
        works = generation.attempt(start)
        return Pending(partial(self._finish, generation, works))

    def _finish(self, generation: Generation, works: list[Any]) -> None:
        """In the caller's thread: with NCCL it is the caller's stream that waits."""
        for work in works:
            generation.attempt(work.wait)
        generation.check()


class Groups:
    def __init__(self, members: list[Worker], peers: list[Worker]):
        self.members, self.peers = members, peers
        self.world: Any = None
        self.stage: Any = None

    def take(self) -> list[Any]:
        groups = [group for group in (self.world, self.stage) if group is not None]
        self.world = self.stage = None
        return groups


def let_go(groups: list[Any]) -> None:
    """Drops the last references to aborted groups, for a thread: destroying one takes up to 300 ms."""
    time.sleep(0.1)
    groups.clear()
