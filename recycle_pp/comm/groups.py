"""Links over groups of NCCL or Gloo that are rebuilt in each generation.

    links = Links(GroupTransport(store, device, timeout, NcclGroup))

A worker has one group with its peers, for sums, from the start of the generation. It has a group with each worker with
which a plan exchanges messages, from the adoption of the plan (`connect`): two groups in a step without a death.

A single group for all messages would be correct, because plans have a total order (`recycle_schedules.actions`). But
NCCL processes the operations of a group in order, so each message would wait for all earlier ones. If there are more
groups than torch has streams (32 per GPU), some share a stream, which is slower and for the same reason safe.
Rendezvous uses the control store, seen from C++ under "<generation>/".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from recycle_schedules import Worker
from torch import Tensor

from .addresses import address_of
from .store import ControlStore
from .waiting import Generation, Job, LinkBroken, Pending, Pool


class Group(Protocol):
    """A kind of groups, as used by `GroupTransport`. The constructor does not wait for other members.

    timeout    seconds until an operation fails on its own
    interface  numeric listening address
    """

    backend: Any  # a back end of torch; `wait` takes the results of its operations

    def __init__(
        self, store: dist.Store, prefix: str, rank: int, size: int, device: torch.device, timeout: float, interface: str
    ) -> None: ...

    def connect(self, pair: bool) -> list[Any]:
        """Makes sure that no later operation waits for a connection. Returns works to be waited for."""

    @staticmethod
    def wait(generation: Generation, work: Any) -> None:
        """Blocks this thread until the work is done. LinkBroken if it failed or the generation has ended."""

    @staticmethod
    def abort(groups: Sequence[Any]) -> None:
        """Makes pending and connecting operations of the groups raise, now or soon. Any thread; once per group."""


class GroupTransport:
    """
    kind       class of the groups
    timeout    seconds until an operation fails on its own
    interface  listening address for Gloo (address, host name or interface name)

    Shares nothing with the groups of an earlier generation."""

    ordered = True

    def __init__(
        self,
        store: ControlStore,
        device: torch.device,
        timeout: float,
        kind: type[Group],
        interface: str = "127.0.0.1",
    ):
        self._store, self._device, self._timeout, self._kind = store, device, timeout, kind
        self._host = address_of(interface)
        self._groups: dict[int, Groups] = {}
        self._pool = Pool()
        self._closing: list[threading.Thread] = []

    def join(self, generation: Generation, members: Sequence[Worker], me: Worker, base: int) -> None:
        groups = self._groups[generation.number] = Groups(sorted(w for w in members if w.stage == me.stage), me)
        if len(groups.peers) > 1:
            (groups.stage,) = self._build(generation, groups, [tuple(groups.peers)])

    def connect(self, generation: Generation, workers: Collection[Worker]) -> None:
        groups = self._of(generation)
        if missing := [worker for worker in workers if worker not in groups.pairs]:
            # In a thread that can be abandoned, like the joining one: connecting to a dead worker may block for ever.
            generation.wait(self._pool.start(partial(self._meet, generation, groups, missing)))

    def _meet(self, generation: Generation, groups: Groups, others: Sequence[Worker]) -> None:
        pairs = meetings(groups.me, others)
        for pair, group in zip(pairs, self._build(generation, groups, pairs), strict=True):
            peer = 1 - pair.index(groups.me)
            groups.pairs[pair[peer]] = group, peer

    def send(self, generation: Generation, tensor: Tensor, to: Worker, tag: int) -> Pending:
        group, peer = self._of(generation).pairs[to]
        return self._run(generation, lambda: [group.backend.send([tensor], peer, tag)])

    def receive(self, generation: Generation, tensor: Tensor, frm: Worker, tag: int) -> Pending:
        group, peer = self._of(generation).pairs[frm]
        return self._run(generation, lambda: [group.backend.recv([tensor], peer, tag)])

    def all_reduce(self, generation: Generation, tensors: Sequence[Tensor]) -> Pending:
        stage = self._of(generation).stage
        return self._run(generation, lambda: [stage.backend.allreduce([t]) for t in tensors if stage is not None])

    def reduce(self, generation: Generation, tensors: Sequence[Tensor], to: Worker) -> Pending:
        groups, options = self._of(generation), dist.ReduceOptions()
        options.rootRank = groups.peers.index(to)
        stage = groups.stage
        return self._run(generation, lambda: [stage.backend.reduce([t], options) for t in tensors if stage is not None])

    def broadcast(self, generation: Generation, tensors: Sequence[Tensor], source: Worker) -> Pending:
        groups, options = self._of(generation), dist.BroadcastOptions()
        options.rootRank = groups.peers.index(source)
        stage = groups.stage
        return self._run(
            generation, lambda: [stage.backend.broadcast([t], options) for t in tensors if stage is not None]
        )

    def end(self, over: Sequence[Generation]) -> None:
        for generation in over:
            self._store.abandon(generation.number)
        ended = [self._groups.pop(generation.number) for generation in over if generation.number in self._groups]
        self._abort([group for each in ended for group in each.take()])

    def close(self, timeout: float) -> None:
        for thread in self._closing:
            thread.join(timeout)

    def _build(self, generation: Generation, groups: Groups, together: Sequence[tuple[Worker, ...]]) -> list[Group]:
        """Builds and connects a group for each of these sets of workers, one after the other."""
        try:
            with self._store.one_message():
                made = [groups.keep(self._make(generation, workers, groups.me)) for workers in together]
            for workers, group in zip(together, made, strict=True):
                pair = workers[0].stage != workers[-1].stage
                for work in generation.attempt(partial(group.connect, pair)):
                    self._kind.wait(generation, work)
        except BaseException:
            # Aborts the groups made after `end` took the others. In a separate thread: an abandoned thread's exceptions
            # are lost, and an abort that hangs must end the process (threading.excepthook).
            abort = threading.Thread(target=self._abort, args=(groups.take(),), name="recycle-abort", daemon=True)
            abort.start()
            abort.join()
            raise
        return made

    def _make(self, generation: Generation, workers: tuple[Worker, ...], me: Worker) -> Group:
        prefix = f"{generation.number}/{workers[0]}-{workers[-1]}"
        return generation.attempt(
            lambda: self._kind(
                self._store, prefix, workers.index(me), len(workers), self._device, self._timeout, self._host
            )
        )

    def _abort(self, groups: list[Group]) -> None:
        self._kind.abort(groups)
        closing = threading.Thread(target=let_go, args=(groups,), name="recycle-close", daemon=True)
        closing.start()  # before another thread may find it in `close`
        self._closing = [*(thread for thread in self._closing if thread.is_alive()), closing]

    def _of(self, generation: Generation) -> Groups:
        groups = self._groups.get(generation.number)
        if groups is None:
            raise LinkBroken(generation.number, "aborted")
        return groups

    def _run(self, generation: Generation, start: Callable[[], list[Any]]) -> Pending:
        works = generation.attempt(start)
        return Pending(partial(self._finish, generation, works), partial(self._arrived, generation, works))

    @staticmethod
    def _arrived(generation: Generation, works: list[Any]) -> bool:
        try:
            return generation.over or all(work.over if isinstance(work, Job) else work.is_completed() for work in works)
        except RuntimeError:  # it has failed, and the wait for it will raise
            return True

    def _finish(self, generation: Generation, works: list[Any]) -> None:
        """Waits in the caller's thread, because with NCCL the caller's stream waits as well."""
        for work in works:
            self._kind.wait(generation, work)
        generation.check()


class Groups:
    """The groups of worker `me` in one generation. peers: the live workers of its stage, including `me`. Any thread."""

    def __init__(self, peers: list[Worker], me: Worker):
        self.peers, self.me = peers, me
        self.pairs: dict[Worker, tuple[Group, int]] = {}  # other worker -> (group, its rank in the group)
        self.stage: Group | None = None  # None: it has no peers
        self._lock = threading.Lock()
        self._made: list[Group] = []

    def keep(self, group: Group) -> Group:
        with self._lock:
            self._made.append(group)
        return group

    def take(self) -> list[Group]:
        """Returns the groups made since the last call, so that each is aborted once."""
        with self._lock:
            made, self._made = self._made, []
        return made


def meetings(me: Worker, others: Iterable[Worker]) -> list[tuple[Worker, Worker]]:
    """The pairs of `me` with workers of adjacent stages, in the order in which their groups are built.

    All workers follow one global order of pairs, so there is always a pair that can proceed. The order has rounds of
    pairs without common workers: first the links from even stages to the next with the same offset of pipelines, then
    those from odd stages. A step without a death needs two rounds for any number of stages.
    """
    pairs = [(me, worker) if me.stage < worker.stage else (worker, me) for worker in others]
    return sorted(pairs, key=lambda pair: (pair[0].stage % 2, pair[1].pipeline - pair[0].pipeline, pair))


def let_go(groups: list[Any]) -> None:
    """Drops the last references to aborted groups. Blocks up to 300 ms per group: run it in a thread."""
    time.sleep(0.1)
    groups.clear()
