"""Links over groups of NCCL or Gloo that are rebuilt in each generation.

    links = Links(GroupTransport(store, device, timeout, NcclGroup))

At the start of a generation a worker joins one group with its peers, for sums and broadcasts. When the worker adopts a
plan (`connect`), it joins a group of two with each worker with which it exchanges messages. In a step without a death
these are at most two groups.

A single group for all messages would be correct, because the messages of a plan have a total order
(`recycle_schedules.actions`). But NCCL processes the operations of a group in order, so each message would wait for all
earlier ones. torch has 32 streams per GPU, so if there are more than 32 groups, some of them share a stream. Sharing is
slower, but safe because of the total order. The members of a group find each other through the control store, under
keys that start with "<generation>/".
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
    """A group as `GroupTransport` uses it. The constructor does not wait for other members.

    timeout    seconds after which an unfinished operation fails
    interface  numeric listening address
    """

    backend: Any  # a back end of torch; pass the results of its operations to `wait`

    def __init__(
        self, store: dist.Store, prefix: str, rank: int, size: int, device: torch.device, timeout: float, interface: str
    ) -> None: ...

    def connect(self, generation: Generation, pair: bool) -> None:
        """Blocks until no later operation waits for a connection. LinkBroken if the generation ends before that."""

    @staticmethod
    def wait(generation: Generation, work: Any) -> None:
        """Blocks this thread until the operation is done. LinkBroken if it fails or the generation ends."""

    @staticmethod
    def abort(groups: Sequence[Any]) -> None:
        """Makes all pending operations of the groups raise soon, also of groups that are still connecting.

        Call it from any thread, once per group."""


class GroupTransport:
    """A `comm.transport.Transport` over groups. A generation's groups share nothing with those of earlier generations.

    kind       class that builds a group: GlooGroup or NcclGroup
    timeout    seconds after which an unfinished operation fails
    interface  listening address for Gloo (address, host name or interface name)
    """

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
            # Runs in a thread that can be abandoned, as `join` does: connecting to a dead worker may block for ever.
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
        """Builds a group for each of these sets of workers, then connects the groups one after the other."""
        try:
            with self._store.one_message():
                made = [groups.keep(self._make(generation, workers, groups.me)) for workers in together]
            for workers, group in zip(together, made, strict=True):
                pair = workers[0].stage != workers[-1].stage
                generation.attempt(partial(group.connect, generation, pair))
        except BaseException:
            # Aborts the groups that were made after `end` took the others. This needs a thread of its own: exceptions
            # in an abandoned thread are lost, but an abort that hangs must end the process (threading.excepthook).
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
        closing.start()  # before it is in `_closing`, because `close` may join it from another thread
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
        except RuntimeError:  # the operation has failed, and the wait for it will raise
            return True

    def _finish(self, generation: Generation, works: list[Any]) -> None:
        """Waits in the caller's thread, because with NCCL the caller's stream waits as well."""
        for work in works:
            self._kind.wait(generation, work)
        generation.check()


class Groups:
    """The groups of worker `me` in one generation. Methods may be called from any thread.

    peers: the live workers of its stage, including `me`
    """

    def __init__(self, peers: list[Worker], me: Worker):
        self.peers, self.me = peers, me
        self.pairs: dict[Worker, tuple[Group, int]] = {}  # other worker -> (group, rank of that worker in the group)
        self.stage: Group | None = None  # the group of all peers; None if `me` is the only live worker of its stage
        self._lock = threading.Lock()
        self._made: list[Group] = []

    def keep(self, group: Group) -> Group:
        with self._lock:
            self._made.append(group)
        return group

    def take(self) -> list[Group]:
        """Returns the groups made since the last call, so that each group is aborted only once."""
        with self._lock:
            made, self._made = self._made, []
        return made


def meetings(me: Worker, others: Iterable[Worker]) -> list[tuple[Worker, Worker]]:
    """The pairs of `me` with workers of adjacent stages, in the order in which their groups are built.

    All workers follow one global order of pairs, so there is always a pair that can proceed. The order consists of
    rounds, and the pairs of a round have no common worker. The first rounds link each even-numbered stage to the next
    stage. There is one round for each difference between the pipeline numbers of the two workers. Then odd-numbered
    stages follow in the same way. A step without a death needs two rounds for any number of stages.
    """
    pairs = [(me, worker) if me.stage < worker.stage else (worker, me) for worker in others]
    return sorted(pairs, key=lambda pair: (pair[0].stage % 2, pair[1].pipeline - pair[0].pipeline, pair))


def let_go(groups: list[Any]) -> None:
    """Drops the last references to aborted groups. Blocks for up to 300 ms per group, so run it in a thread."""
    time.sleep(0.1)
    groups.clear()
