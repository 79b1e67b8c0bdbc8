"""The routing of a generation: who talks to whom, by worker instead of by rank.

    links = Links(store, "gloo", torch.device("cpu"), interface="127.0.0.1")
    links.rebuild(generation, members, me)          # blocks until every member has joined; in an abandonable thread
    work = links.receive(buffer, frm=Worker(0, 1), tag=17)
    links.send(tensor, to=Worker(1, 2), tag=18)
    links.all_reduce([gradient, losses]).wait()     # in place, over the live workers of my stage
    links.abort()                                   # from any thread: all of the above raise LinkBroken

The executor asks for nothing else. It may keep many receives and sends outstanding, in any order, with unique tags.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from recycle_pp.comm.abort import LinkBroken
from recycle_pp.comm.group import GlooGroup, Group, NcclGroup, abort_groups
from recycle_pp.comm.store import ControlStore

if TYPE_CHECKING:
    from recycle_schedules import Worker


class Links:
    """The groups of the present generation: all members, and the live workers of my stage.

    store: rendezvous; backend: "gloo" or "nccl"; interface: where Gloo listens (address, host name or interface name);
    timeout: seconds after which an operation fails although nobody is known to have died. The control plane decides
    about deaths, so it is long.
    """

    def __init__(
        self,
        store: ControlStore,
        backend: str,
        device: torch.device,
        interface: str = "127.0.0.1",
        timeout: float = 1800.0,
    ):
        if backend not in ("gloo", "nccl"):
            raise ValueError(f"backend: {backend!r} is neither 'gloo' nor 'nccl'")
        self._store, self._backend, self._device = store, backend, device
        self._interface, self._timeout = interface, timeout
        self._lock = threading.Lock()
        self._wanted = -1  # newest generation that anybody asked for
        self._present: _Generation | None = None
        self._building: list[_Generation] = []
        self._undertakers: list[threading.Thread] = []
        self.rebuild_seconds = 0.0  # of the last rebuild
        self.abort_seconds = 0.0  # of the last abort, until every connection was shut

    @property
    def generation(self) -> int:
        """-1 before the first rebuild and after an abort."""
        present = self._present
        return -1 if present is None else present.number

    def rebuild(self, generation: int, members: Sequence[Worker], me: Worker) -> None:
        """Builds the groups of `generation`. Every member calls it with the same members in the same order.

        Blocks until all have; LinkBroken when it is aborted or a newer generation is wanted meanwhile, and then nothing
        of it stays. Generations only grow.
        """
        start = time.perf_counter()
        new = _Generation(generation, members, [worker for worker in members if worker.stage == me.stage])
        with self._lock:
            if generation <= self._wanted:
                raise LinkBroken(generation, f"superseded by generation {self._wanted}")
            over = self._take_all()
            self._wanted = generation
            self._building.append(new)
        self._end(over)
        try:
            with self._store.one_message():
                new.world = self._group(f"{generation}/world", new.rank, me)
                new.stage = self._group(f"{generation}/stage{me.stage}", new.peer, me)
            for group in new.groups():
                group.connect()
            with self._lock:
                if new.over:
                    raise LinkBroken(generation, "aborted while it was built")
                self._building.remove(new)
                self._present = new
        except BaseException:
            self._end([new])
            raise
        self.rebuild_seconds = time.perf_counter() - start

    def send(self, tensor: Tensor, to: Worker, tag: int) -> Pending:
        """Sends a contiguous tensor; it must not change until the work is done (Gloo: when the receiver has posted)."""
        now = self._now()
        return now.start(now.world, lambda world: [world.send([tensor], now.rank[to], tag)])

    def receive(self, tensor: Tensor, frm: Worker, tag: int) -> Pending:
        """Fills a contiguous tensor of the very size that is sent."""
        now = self._now()
        return now.start(now.world, lambda world: [world.recv([tensor], now.rank[frm], tag)])

    def all_reduce(self, tensors: Sequence[Tensor]) -> Pending:
        """Sums each tensor in place over the live workers of my stage. After an abort the tensors hold garbage."""
        now = self._now()
        return now.start(now.stage, lambda stage: [stage.allreduce([tensor]) for tensor in tensors], len(now.peer))

    def broadcast(self, tensors: Sequence[Tensor], source: Worker) -> Pending:
        """Copies the tensors of `source`, a live worker of my stage, into those of its peers."""
        now = self._now()
        options = dist.BroadcastOptions()
        options.rootRank = now.peer[source]
        return now.start(now.stage, lambda stage: [stage.broadcast([t], options) for t in tensors], len(now.peer))

    def barrier(self) -> Pending:
        """Done when every member of the generation has called it."""
        now = self._now()
        token = torch.zeros(1, device=self._device)
        return now.start(now.world, lambda world: [world.allreduce([token])], len(now.rank))

    def abort(self) -> None:
        """Ends the present generation and any that is being built: blocked and later operations raise LinkBroken.

        Any thread, any number of times. The groups are destroyed by a thread of their own (it takes up to 300 ms).
        """
        with self._lock:
            over = self._take_all()
        self._end(over)

    def close(self, timeout: float = 5.0) -> None:
        """abort(), and waits until the old groups are gone. Call it before the process ends."""
        self.abort()
        for undertaker in list(self._undertakers):
            undertaker.join(timeout)

    def _group(self, prefix: str, ranks: dict[Worker, int], me: Worker) -> Group | None:
        if len(ranks) == 1:
            return None
        if self._backend == "nccl":
            return NcclGroup(self._store, prefix, ranks[me], len(ranks), self._device, self._timeout)
        return GlooGroup(self._store, prefix, ranks[me], len(ranks), self._interface, self._timeout)

    def _now(self) -> _Generation:
        present = self._present
        if present is None:
            raise LinkBroken(self._wanted, "aborted, and not rebuilt yet")
        return present

    def _take_all(self) -> list[_Generation]:
        over = self._building + ([self._present] if self._present else [])
        self._building, self._present = [], None
        for old in over:
            old.over = True
        return over

    def _end(self, over: list[_Generation]) -> None:
        """Wakes whoever waits in these generations, and hands their groups to an undertaker."""
        if not over:
            return
        start = time.perf_counter()
        for old in over:
            old.over = True
            self._store.abandon(old.number)
        abort_groups([group for old in over for group in old.groups()])
        self.abort_seconds = time.perf_counter() - start
        self._undertakers = [thread for thread in self._undertakers if thread.is_alive()]
        undertaker = threading.Thread(target=_bury, args=(over,), name="recycle-undertaker", daemon=True)
        self._undertakers.append(undertaker)
        undertaker.start()


class Pending:
    """An operation under way. It is waited for, or dropped after its generation has ended; both are safe at any time.

    The generation owns Gloo's works and with them the tensors: destroying a work can take as long as destroying its
    group, so that is left to the undertaker.
    """

    __slots__ = ("_done", "_generation", "_key")

    def __init__(self, generation: _Generation, key: int):
        self._generation, self._key, self._done = generation, key, False

    def wait(self) -> None:
        """Blocks until done. LinkBroken when the generation ends first, or when a peer's connection breaks."""
        if not self._done:
            self._generation.finish(self._key)
            self._done = True


class _Generation:
    def __init__(self, number: int, members: Sequence[Worker], peers: Sequence[Worker]):
        self.number = number
        self.over = False
        self.rank = {worker: rank for rank, worker in enumerate(members)}  # in the group of all members
        self.peer = {worker: rank for rank, worker in enumerate(peers)}  # in the group of my stage
        self.world: Group | None = None
        self.stage: Group | None = None
        self._works: dict[int, list[dist.Work]] = {}
        self._started = 0

    def groups(self) -> list[Group]:
        return [group for group in (self.world, self.stage) if group is not None]

    def start(self, group: Group | None, operation: Callable[..., list[dist.Work]], size: int = 2) -> Pending:
        """Runs `operation(backend)`; among `size` = 1 members there is nothing to do."""
        works = self._try(lambda: [] if size == 1 else operation(group.backend))  # type: ignore[union-attr]
        self._started += 1
        self._works[self._started] = works
        return Pending(self, self._started)

    def finish(self, key: int) -> None:
        def wait() -> None:
            for work in self._works[key]:
                work.wait()

        self._try(wait)
        self._works.pop(key, None)

    def bury(self) -> None:
        self.world = self.stage = None
        self._works.clear()

    def _try(self, operation: Callable):
        if self.over:
            raise LinkBroken(self.number, "aborted")
        try:
            return operation()
        except (RuntimeError, KeyError, AttributeError) as error:
            if self.over:
                raise LinkBroken(self.number, "aborted") from error
            if not isinstance(error, RuntimeError):
                raise
            raise LinkBroken(self.number, str(error).partition("\n")[0], aborted=False) from error


def _bury(over: list[_Generation]) -> None:
    """Breaks what was under way when the generation ended, then lets go of the groups; neither is urgent."""
    time.sleep(0.1)
    for old in over:
        for group in old.groups():
            if isinstance(group, GlooGroup):
                group.abort()
                group.answer_for_the_missing()
    for old in over:
        old.bury()
