"""Links over TCP, through one mesh of connections that survives deaths. Every message carries its generation.

    links = Links(TcpTransport(store, "127.0.0.1", size=12, keepalive=10.0))

Times relative to Gloo over loopback (`bench/links.py`, torch 2.13, docs/process-group.md): A message of 4 to 64 KiB
takes a third of the time and of the CPU time. A sum of 4 KiB takes between a tenth and a quarter of the time. A sum of
16 MiB takes as long as with Gloo, or up to a third longer. A new generation takes a quarter of the time.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from torch import Tensor

from recycle_pp.comm.store import ControlStore
from recycle_pp.comm.tcp import collectives
from recycle_pp.comm.waiting import Generation, LinkBroken, Pending, Pool
from recycle_pp.linux.addresses import address_of
from recycle_pp.wire.messages.members import Assignment, Member

from .connection import Connection
from .mesh import Mesh
from .reachability import Reachability

GRACE = 2.0  # seconds beyond `keepalive` until a connection breaks; by then attempts have shown whether the link is cut
Collective = Callable[[Sequence[collectives.Route | None], int], None]
"""Runs one of `collectives` with these peers and this tag"""
MAX_TAG = 2**25  # tags of callers are smaller; tags of collectives start here


class TcpTransport:
    """A `comm.transport.Transport` for CPU tensors.

    store        rendezvous for the members' addresses
    interface    listening address (address, host name or interface name)
    size         number of launched processes, any of which may become a member; None: no connection outlives a
                 generation
    keepalive    seconds of failed connection attempts after which a member is reported as unreachable. A connection
                 breaks after GRACE more seconds without an answer. None: no reports, and the kernel's default
    unreachable  called in a separate thread with the unreachable members, repeatedly while they stay unreachable
    """

    ordered = False

    def __init__(
        self,
        store: ControlStore,
        interface: str,
        size: int | None = None,
        keepalive: float | None = None,
        unreachable: Callable[[list[Member]], None] = lambda members: None,
    ):
        self._store, self._host = store, address_of(interface)
        self._keepalive = None if keepalive is None else keepalive + GRACE
        self._size = size
        self._reachability = Reachability(keepalive if size else None, unreachable)
        self._pool = Pool()
        self._lock = threading.Lock()
        self._mesh: Mesh | None = None
        self._number = -1  # the generation in which the mesh was built
        self._routes: dict[int, Routes] = {}  # one entry: current generation -> its routes

    def join(self, generation: Generation, members: Assignment, me: Member, base: int) -> None:
        size = self._size or max(members) + 1
        if max(members) >= size:
            raise ValueError(f"member {max(members)} is out of range (size {size})")
        number = base if self._size else generation.number
        mesh = self._mesh_of(generation, number, me, size)
        others = sorted(members.keys() - {me})
        if not mesh.is_linked:
            keys = {member: _key(number, member) for member in others}
            self._store.collect(list(keys.values()), lambda: generation.over)
            with self._lock:
                generation.check()
                if not mesh.is_linked:
                    mesh.link({k: self._store.get(key) for k, key in keys.items()})
        self._wait_for_links(generation, mesh, others)
        routes = {member: Route(generation, mesh[member]) for member in others}
        with self._lock:
            generation.check()  # an abandoned thread must not replace the routes of a newer generation
            self._routes = {generation.number: Routes(routes, members, me)}

    def _wait_for_links(self, generation: Generation, mesh: Mesh, members: Collection[Member]) -> None:
        """Blocks until all links are established or the generation ends. The coordinator decides how long this may
        take, because `unreachable` reports the missing links to it."""
        mesh.keep(members)
        for member in members:
            link = mesh.linked(member)
            if link is None:
                generation.check()  # a newer generation without this member may have linked the mesh
                raise ValueError(f"member {member} joined after the base of generation {generation.number}")
            generation.wait(link)

    def connect(self, generation: Generation, members: Collection[Member]) -> None:
        """Does nothing: `join` waits for the connections to all members."""

    def send(self, generation: Generation, tensor: Tensor, to: Member, tag: int) -> Pending:
        return self._of(generation).routes[to].send(tensor, _allowed(tag))

    def receive(self, generation: Generation, tensor: Tensor, frm: Member, tag: int) -> Pending:
        return self._of(generation).routes[frm].receive(tensor, _allowed(tag))

    def all_reduce(self, generation: Generation, tensors: Sequence[Tensor]) -> Pending:
        routes = self._of(generation)
        return self._collective(generation, routes, lambda peers, tag: collectives.all_reduce(tensors, peers, tag))

    def reduce(self, generation: Generation, tensors: Sequence[Tensor], to: Member) -> Pending:
        routes = self._of(generation)
        root = routes.stage.index(to)
        return self._collective(generation, routes, lambda peers, tag: collectives.reduce(tensors, peers, root, tag))

    def broadcast(self, generation: Generation, tensors: Sequence[Tensor], source: Member) -> Pending:
        routes = self._of(generation)
        root = routes.stage.index(source)
        return self._collective(generation, routes, lambda peers, tag: collectives.broadcast(tensors, peers, root, tag))

    def received(self) -> int:
        mesh = self._mesh
        return 0 if mesh is None else mesh.received

    def end(self, over: Sequence[Generation]) -> None:
        self._store.wake()
        with self._lock:
            mesh = self._mesh
        if mesh is not None:
            mesh.end(max(generation.number for generation in over))

    def close(self, timeout: float) -> None:
        """Closes all connections. Does not block."""
        with self._lock:
            self._replace(None)

    def _of(self, generation: Generation) -> Routes:
        routes = self._routes.get(generation.number)
        if routes is None:
            raise LinkBroken(generation.number, "aborted")
        return routes

    def _collective(self, generation: Generation, routes: Routes, run: Collective) -> Pending:
        generation.check()
        tag = MAX_TAG + next(routes.collectives)
        if len(routes.peers) == 1:
            return Pending(None)
        awaited: list[tuple[Member, Pending]] = []
        peers = [
            route and Awaited(route, member, awaited) for member, route in zip(routes.stage, routes.peers, strict=True)
        ]
        pending = generation.pending(self._pool.start(lambda: run(peers, tag)))
        pending.lacks = lambda: sorted({member for member, message in awaited if not message.arrived()})
        return pending

    def _mesh_of(self, generation: Generation, number: int, rank: int, size: int) -> Mesh:
        with self._lock:
            generation.check()
            if self._mesh is not None and self._number == number:
                return self._mesh
            mesh = Mesh(rank, size, self._host, self._pool, self._reachability, self._keepalive)
            self._replace(mesh)
            self._number = number
        self._store.set(_key(number, rank), mesh.address)
        return mesh

    def _replace(self, mesh: Mesh | None) -> None:
        old, self._mesh = self._mesh, mesh
        if old is not None:
            self._store.abandon(self._number)
            old.close()


class Route(NamedTuple):
    """The route to one peer, for one generation."""

    generation: Generation
    connection: Connection

    def send(self, tensor: Tensor, tag: int) -> Pending:
        return self.generation.pending(self.connection.send(tensor, self._now(), tag))

    def receive(self, tensor: Tensor, tag: int) -> Pending:
        return self.generation.pending(self.connection.receive(tensor, self._now(), tag))

    def _now(self) -> int:
        self.generation.check()
        return self.generation.number


class Awaited(NamedTuple):
    """A route to `member` that appends (member, pending) to `awaited` for each message that it receives."""

    route: Route
    member: Member
    awaited: list[tuple[Member, Pending]]

    def send(self, tensor: Tensor, slot: int) -> Pending:
        return self.route.send(tensor, slot)

    def receive(self, tensor: Tensor, slot: int) -> Pending:
        pending = self.route.receive(tensor, slot)
        self.awaited.append((self.member, pending))
        return pending


class Routes:
    """The routes of one generation.

    routes  other member -> its route
    peers   routes to the members of this stage, in the order in which their gradients are summed
    """

    def __init__(self, routes: dict[Member, Route], members: Assignment, me: Member):
        self.routes = routes
        self.stage = sorted(member for member, worker in members.items() if worker.stage == members[me].stage)
        self.peers = [routes.get(member) for member in self.stage]  # None: this member
        self.collectives = itertools.count()  # numbers the calls; all members of the stage make the same calls in order


def _allowed(tag: int) -> int:
    if not 0 <= tag < MAX_TAG:
        raise ValueError(f"tag {tag} is outside 0..{MAX_TAG - 1}")
    return tag


def _key(number: int, member: Member) -> str:
    return f"{number}/tcp/{member}"
