"""Links over NCCL or Gloo groups. A group is kept if it is idle and all its members take part in the next generation.

    links = Links(GroupTransport(store, device, timeout, NcclGroup))

At the start of a generation a member joins one group with its peers, for sums and broadcasts. When it adopts a plan
(`connect`), it joins a pair (a group of two) with each member with which it exchanges messages. In a step without a
death a member needs at most two pairs.

A single group for all messages would be correct, because the messages of a plan have a total order
(`recycle_schedules.actions`). But NCCL processes the operations of a group in order, so each message would wait for all
earlier messages. torch has 32 streams per GPU, so more than 32 groups share streams. Sharing is slower, but safe
because of the total order. The members of a group find each other through the control store, under keys that start with
"<generation>/".

At the end of a generation a member aborts only groups in which it has a pending operation, without waiting for other
members. In the next generation it publishes the counts of its other groups (`endpoint.agreed`). From these counts the
members of a group agree whether to keep or rebuild it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from msgspec import msgpack
from recycle_schedules import Worker
from torch import Tensor

from recycle_pp.linux.addresses import address_of
from recycle_pp.wire.messages.members import Assignment, Member

from .endpoint import Endpoint, agreed
from .store import ControlStore
from .waiting import Generation, Job, LinkBroken, Pending, Pool


class Group(Protocol):
    """The interface that `GroupTransport` needs. The constructor does not wait for other members.

    timeout    seconds after which an unfinished operation fails
    interface  numeric listening address
    """

    backend: Any  # a torch back end; pass the results of its operations to `wait`

    def __init__(
        self, store: dist.Store, prefix: str, rank: int, size: int, device: torch.device, timeout: float, interface: str
    ) -> None: ...

    def connect(self, generation: Generation, pair: bool) -> None:
        """Prepares the group's connections. Blocks until later operations need not wait for a connection.

        Raises LinkBroken if the generation ends first."""

    @staticmethod
    def wait(generation: Generation, work: Any) -> None:
        """Blocks this thread until the operation is done. Raises LinkBroken if it fails or the generation ends."""

    @staticmethod
    def abort(groups: Sequence[Any]) -> None:
        """Makes all pending operations of the groups raise soon, even if a group is still connecting.

        Call it from any thread, once per group."""


class GroupTransport:
    """A `comm.transport.Transport` over groups.

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
        self._lock = threading.Lock()
        self._groups: dict[int, Groups] = {}
        self._left: list[Endpoint] = []  # idle groups of ended generations
        self._pool = Pool()
        self._closing: list[threading.Thread] = []

    def join(self, generation: Generation, members: Assignment, me: Member, base: int) -> None:
        """Keeps the idle groups of generations since `base`. Builds the group of the stage if it is not among
        them."""
        groups = Groups(members, me)
        with self._lock:
            generation.check()
            self._groups[generation.number] = groups
            left, self._left = self._left, []
            offered = [end for end in left if end.born >= base and members.keys() >= {*end.members}]
            groups.hold(offered)
        dropped = [end for end in left if end not in offered]
        del left  # otherwise this thread could drop the last reference to an aborted group, see `let_go`
        if base < generation.number:
            self._store.set(_key(generation, me), msgpack.encode({end.name: end.counts for end in offered}))
        self._abort(dropped)
        if offered:
            self._keep(generation, groups, offered)
        if len(groups.peers) > 1 and groups.stage is None:
            self._build(generation, groups, [tuple(groups.peers)])

    def _keep(self, generation: Generation, groups: Groups, offered: list[Endpoint]) -> None:
        """Waits until all members of these groups have published their counts. Aborts a group if the counts of its
        members differ."""
        members = sorted({member for end in offered for member in end.members})
        values = self._store.collect([_key(generation, member) for member in members], lambda: generation.over)
        counts = (msgpack.decode(value, type=dict[str, list[int]]) for value in values)
        kept = agreed(offered, dict(zip(members, counts, strict=True)))
        with self._lock:
            generation.check()
            for end in kept:
                groups.use(generation, end)
            rejected = groups.drop([end for end in offered if end not in kept])
        self._abort(rejected)

    def connect(self, generation: Generation, members: Collection[Member]) -> None:
        groups = self._of(generation)
        groups.wanted.update(members)
        if missing := [member for member in members if member not in groups.pairs]:
            # Connecting to a dead member may never end, so it runs in a thread that can be abandoned, as `join` does.
            generation.wait(self._pool.start(partial(self._meet, generation, groups, missing)))

    def _meet(self, generation: Generation, groups: Groups, others: Sequence[Member]) -> None:
        self._build(generation, groups, meetings(groups.me, others, groups.members))

    def send(self, generation: Generation, tensor: Tensor, to: Member, tag: int) -> Pending:
        end = self._of(generation).pairs[to]
        return self._run(generation, end, lambda backend: [backend.send([tensor], 1 - end.rank, tag)], end.rank)

    def receive(self, generation: Generation, tensor: Tensor, frm: Member, tag: int) -> Pending:
        end = self._of(generation).pairs[frm]
        return self._run(generation, end, lambda backend: [backend.recv([tensor], 1 - end.rank, tag)], 1 - end.rank)

    def all_reduce(self, generation: Generation, tensors: Sequence[Tensor]) -> Pending:
        stage = self._of(generation).stage
        return self._run(generation, stage, lambda backend: [backend.allreduce([t]) for t in tensors])

    def reduce(self, generation: Generation, tensors: Sequence[Tensor], to: Member) -> Pending:
        groups, options = self._of(generation), dist.ReduceOptions()
        options.rootRank = groups.peers.index(to)
        return self._run(generation, groups.stage, lambda backend: [backend.reduce([t], options) for t in tensors])

    def broadcast(self, generation: Generation, tensors: Sequence[Tensor], source: Member) -> Pending:
        groups, options = self._of(generation), dist.BroadcastOptions()
        options.rootRank = groups.peers.index(source)
        return self._run(generation, groups.stage, lambda backend: [backend.broadcast([t], options) for t in tensors])

    def received(self) -> None:
        """None: Gloo and NCCL do not count bytes."""

    def end(self, over: Sequence[Generation]) -> None:
        """Aborts groups with a pending operation, and pairs that the last plan did not need. Keeps the other groups for
        `join` or `close`."""
        for generation in over:
            self._store.abandon(generation.number)
        with self._lock:
            ended = [self._groups.pop(generation.number) for generation in over if generation.number in self._groups]
            held = [(end, each.needs(end)) for each in ended for end in each.take()]
            # A thread that is starting an operation may hang in the driver. In that case any query would hang too.
            ask = not any([end.close() for end, _ in held])
            idle = [end for end, needed in held if needed and end.is_idle(ask)]
            self._left += idle
        self._abort([end for end, _ in held if end not in idle])

    def close(self, timeout: float) -> None:
        with self._lock:
            left, self._left = self._left, []
        self._abort(left)
        for thread in self._closing:
            thread.join(timeout)

    def _build(self, generation: Generation, groups: Groups, together: Sequence[tuple[Member, ...]]) -> None:
        """Builds a group for each set of members in `together`, then connects one group after the other."""
        made: list[Endpoint] = []
        try:
            with self._store.one_message():
                for members in together:
                    made.append(self._make(generation, groups, members))
                    groups.hold(made[-1:])
            for end in made:
                generation.attempt(partial(end.group.connect, generation, end.pair))
                with self._lock:
                    generation.check()
                    groups.use(generation, end)
        except BaseException:
            # Aborts these groups unless `end` has taken them. An abort that hangs raises, and threading.excepthook must
            # then end the process. So the aborts run in a thread of their own: this one may have been abandoned, and
            # its exceptions would be lost.
            with self._lock:
                unused = groups.drop(made)
            abort = threading.Thread(target=self._abort, args=(unused,), name="recycle-abort", daemon=True)
            abort.start()
            abort.join()
            raise

    def _make(self, generation: Generation, groups: Groups, members: tuple[Member, ...]) -> Endpoint:
        first, *_, last = (groups.members[member] for member in members)
        name, rank = f"{generation.number}/{first}-{last}", members.index(groups.me)
        group = generation.attempt(
            lambda: self._kind(self._store, name, rank, len(members), self._device, self._timeout, self._host)
        )
        return Endpoint(name, members, groups.me, group, generation.number, pair=first.stage != last.stage)

    def _abort(self, ends: list[Endpoint]) -> None:
        if not ends:
            return
        self._kind.abort([end.group for end in ends])
        closing = threading.Thread(target=let_go, args=(ends,), name="recycle-close", daemon=True)
        # Starts the thread before adding it to `_closing`, because `close` joins these threads, from another thread.
        closing.start()
        self._closing = [*(thread for thread in self._closing if thread.is_alive()), closing]

    def _of(self, generation: Generation) -> Groups:
        groups = self._groups.get(generation.number)
        if groups is None:
            raise LinkBroken(generation.number, "aborted")
        return groups

    def _run(
        self, generation: Generation, end: Endpoint | None, operation: Callable[[Any], list[Any]], lane: int = 0
    ) -> Pending:
        """Starts `operation` on the group of `end` and returns it as pending.

        end   None if this worker is alone in its stage, so that no operation is needed
        lane  see `Endpoint.counts`
        """
        generation.check()
        works = [] if end is None else generation.attempt(lambda: end.start(generation, lane, operation))
        return Pending(partial(self._finish, generation, works), partial(self._arrived, generation, works))

    @staticmethod
    def _arrived(generation: Generation, works: list[Any]) -> bool:
        try:
            return generation.over or all(work.over if isinstance(work, Job) else work.is_completed() for work in works)
        except RuntimeError:  # the operation has failed, so waiting for it will raise
            return True

    def _finish(self, generation: Generation, works: list[Any]) -> None:
        """Waits for all operations in the caller's thread, because with NCCL the caller's stream must wait too."""
        for work in works:
            self._kind.wait(generation, work)
        generation.check()


class Groups:
    """The groups of member `me` in one generation. GroupTransport calls the methods under its lock.

    peers: the live members of the stage of `me`, including `me`, ascending
    """

    def __init__(self, members: Assignment, me: Member):
        self.members, self.me = members, me
        self.peers = sorted(member for member, worker in members.items() if worker.stage == members[me].stage)
        self.pairs: dict[Member, Endpoint] = {}  # member at the other end -> the pair
        self.stage: Endpoint | None = None  # the group of all peers; None if `me` is the only live member of its stage
        self.wanted: set[Member] = set()  # members at the other ends of all pairs that plans have needed
        self._held: list[Endpoint] = []

    def hold(self, ends: Sequence[Endpoint]) -> None:
        self._held += ends

    def use(self, generation: Generation, end: Endpoint) -> None:
        end.open(generation)
        if end.other is None:
            self.stage = end
        else:
            self.pairs[end.other] = end

    def needs(self, end: Endpoint) -> bool:
        """Whether the plans of this generation use the group. True for the group of the stage, and for every pair
        before the first plan. Other pairs are not kept, because their number would grow with each death."""
        return end.other is None or not self.wanted or end.other in self.wanted

    def take(self) -> list[Endpoint]:
        """Releases and returns all held groups, so that each group is aborted only once."""
        held, self._held = self._held, []
        return held

    def drop(self, ends: Sequence[Endpoint]) -> list[Endpoint]:
        """Releases and returns the groups in `ends` that are still held."""
        dropped = [end for end in ends if end in self._held]
        self._held = [end for end in self._held if end not in ends]
        return dropped


def meetings(me: Member, others: Iterable[Member], members: Assignment) -> list[tuple[Member, Member]]:
    """The pairs of `me` with the members `others`, in the order in which the groups of the pairs are built. The first
    member of each pair belongs to the earlier stage.

    others   members of adjacent stages
    members  member (process) -> its worker (pipeline and stage)

    All members follow one global order of pairs, so some pair can always proceed. The order consists of rounds, and the
    pairs of a round have no common member. The first rounds link each even-numbered stage to the next stage. There is
    one round for each difference between the pipeline numbers of the two workers. The later rounds link each
    odd-numbered stage to the next stage in the same way. A step without a death needs two rounds for any number of
    stages.
    """

    def order(pair: tuple[Member, Member]) -> tuple[int, int, Worker, Worker]:
        before, after = members[pair[0]], members[pair[1]]
        return before.stage % 2, after.pipeline - before.pipeline, before, after

    return sorted(((me, o) if members[me].stage < members[o].stage else (o, me) for o in others), key=order)


def _key(generation: Generation, member: Member) -> str:
    return f"{generation.number}/idle/{member}"


def let_go(groups: list[Any]) -> None:
    """Drops the last references to aborted groups. Blocks for up to 300 ms per group, so run it in a thread."""
    time.sleep(0.1)
    groups.clear()
