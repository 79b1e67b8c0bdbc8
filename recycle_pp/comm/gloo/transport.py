"""Links over Gloo: one mesh of connections that a death leaves standing, and slots that tell the generations apart."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

from recycle_schedules import Worker
from torch import Tensor

from recycle_pp.comm.addresses import address_of
from recycle_pp.comm.store import ControlStore
from recycle_pp.comm.waiting import Generation, LinkBroken, Pending, Pool

from . import collectives
from .mesh import Mesh, Message

RENEWAL = 32  # generations after which the mesh is built anew, and lets go of what aborted ones have left in it
LINK_SECONDS = 10.0  # for the connections of a generation to stand; loopback and data centres take milliseconds
MAX_TAG = 2**25  # tags of the caller; as many slots above them are for collectives, and 32 such pairs fill 31 bits


class GlooTransport:
    def __init__(
        self, store: ControlStore, interface: str, timeout: float, workers: Sequence[Worker], silence: float | None
    ):
        self._store, self._interface, self._timeout = store, address_of(interface), timeout
        self._silence = silence
        self._workers = list(workers)
        self._pool = Pool()
        self._lock = threading.Lock()
        self._mesh: Mesh | None = None
        self._number = -1  # the generation in which the mesh was built
        self._routes: dict[int, Routes] = {}  # of the present generation, by its number
        self._closing: list[threading.Thread] = []

    def join(self, generation: Generation, members: Sequence[Worker], me: Worker, base: int) -> None:
        everybody = self._workers or list(members)
        if unknown := set(members) - set(everybody):
            raise ValueError(f"members {sorted(unknown)} are not among the workers that Links was made with")
        if not self._workers:
            base = generation.number  # ranks follow the members: no connection can be kept
        rank = {worker: k for k, worker in enumerate(everybody)}
        number = max(base, generation.number - generation.number % RENEWAL)
        mesh = self._mesh_of(generation, number, rank[me], len(rank))
        others = [worker for worker in members if worker != me]
        if not mesh.is_linked:
            keys = {rank[worker]: _key(number, rank[worker]) for worker in others}
            self._store.collect(list(keys.values()), lambda: generation.over)
            with self._lock:
                generation.check()
                if not mesh.is_linked:
                    mesh.link({k: self._store.get(key) for k, key in keys.items()})
        self._wait_for_links(generation, mesh, {worker: rank[worker] for worker in others})
        ways = {worker: Way(generation, mesh, rank[worker]) for worker in others}
        with self._lock:
            generation.check()  # an abandoned thread must not put its routes in the place of a newer generation's
            self._routes = {generation.number: Routes(ways, members, me, generation.number)}

    def _wait_for_links(self, generation: Generation, mesh: Mesh, ranks: dict[Worker, int]) -> None:
        deadline = time.monotonic() + LINK_SECONDS
        unreachable = []
        for worker, rank in ranks.items():
            link = mesh.linked(rank)
            if link is None:
                raise ValueError(f"{worker} joined later than the base of generation {generation.number}")
            if not generation.wait(link, max(0.0, deadline - time.monotonic())):
                unreachable.append(worker)
        if unreachable:
            reason = f"no connection to {', '.join(map(str, unreachable))} in {LINK_SECONDS:g} s"
            raise LinkBroken(generation.number, reason, aborted=False, unreachable=unreachable)
        if self._silence is not None:
            mesh.end_after_silence(self._silence)

    def connect(self, generation: Generation, workers: Collection[Worker]) -> None:
        """They are: `join` waits for the connections to all members."""

    def send(self, generation: Generation, tensor: Tensor, to: Worker, tag: int) -> Pending:
        routes = self._of(generation)
        message = generation.attempt(lambda: routes.ways[to].send(tensor, routes.slot(tag)))
        return Pending(partial(self._finish, generation, message))

    def receive(self, generation: Generation, tensor: Tensor, frm: Worker, tag: int) -> Pending:
        routes = self._of(generation)
        # A thread waits from now on: whoever asks for a message that has come goes on at once (1 % of a step that has
        # 20 ms ops).
        message = generation.attempt(lambda: routes.ways[frm].receive(tensor, routes.slot(tag)))
        return Pending(partial(generation.wait, self._pool.start(message.wait)))

    def all_reduce(self, generation: Generation, tensors: Sequence[Tensor]) -> Pending:
        routes = self._of(generation)
        return self._collective(generation, routes.peers, partial(collectives.all_reduce, tensors, routes.peers.ways))

    def broadcast(self, generation: Generation, tensors: Sequence[Tensor], source: Worker) -> Pending:
        routes = self._of(generation)
        root = routes.peers.workers.index(source)
        return self._collective(
            generation, routes.peers, partial(collectives.broadcast, tensors, routes.peers.ways, root)
        )

    def end(self, over: Sequence[Generation]) -> None:
        self._store.wake()

    def close(self, timeout: float) -> None:
        with self._lock:
            self._replace(None)
        for thread in self._closing:
            thread.join(timeout)

    def _of(self, generation: Generation) -> Routes:
        routes = self._routes.get(generation.number)
        if routes is None:
            raise LinkBroken(generation.number, "aborted")
        return routes

    def _finish(self, generation: Generation, message: Message) -> None:
        generation.check()
        generation.wait(self._pool.start(message.wait))

    def _collective(self, generation: Generation, circle: Circle, run: Callable[[int], None]) -> Pending:
        generation.check()
        slot = next(circle.slots)
        if len(circle.ways) == 1:
            return Pending(None)
        return Pending(partial(generation.wait, self._pool.start(lambda: run(slot))))

    def _mesh_of(self, generation: Generation, number: int, rank: int, size: int) -> Mesh:
        with self._lock:
            generation.check()
            if self._mesh is not None and self._number == number:
                return self._mesh
            mesh = Mesh(rank, size, self._interface, self._timeout, self._pool)
            self._replace(mesh)
            self._number = number
        self._store.set(_key(number, rank), mesh.address)
        return mesh

    def _replace(self, mesh: Mesh | None) -> None:
        """Closing takes a while: in a thread."""
        old, self._mesh = self._mesh, mesh
        if old is not None:
            self._store.abandon(self._number)
            self._closing = [thread for thread in self._closing if thread.is_alive()]
            self._closing.append(threading.Thread(target=old.close, name="recycle-close", daemon=True))
            self._closing[-1].start()


class Way(NamedTuple):
    """To one peer, as long as the generation lasts."""

    generation: Generation
    mesh: Mesh
    rank: int

    def send(self, tensor: Tensor, slot: int) -> Message:
        self.generation.check()
        return self.mesh.send(tensor, self.rank, slot)

    def receive(self, tensor: Tensor, slot: int) -> Message:
        self.generation.check()
        return self.mesh.receive(tensor, self.rank, slot)


class Routes:
    """Of one generation: the way to every other member, and its share of the slots."""

    def __init__(self, ways: dict[Worker, Way], members: Sequence[Worker], me: Worker, number: int):
        self.ways = ways
        self._first = number % RENEWAL * 2 * MAX_TAG  # no two generations in the life of a mesh share a slot
        slots = range(self._first + MAX_TAG, self._first + 2 * MAX_TAG - 2)
        self.peers = Circle([worker for worker in members if worker.stage == me.stage], ways, slots)

    def slot(self, tag: int) -> int:
        if not 0 <= tag < MAX_TAG:
            raise ValueError(f"tag {tag}: 0 to {MAX_TAG - 1} are allowed")
        return self._first + tag


class Circle:
    """Workers that do collectives together, and a slot for each one: their counts agree as their calls do."""

    def __init__(self, workers: list[Worker], ways: dict[Worker, Way], slots: Sequence[int]):
        self.workers = workers
        self.ways = [ways.get(worker) for worker in workers]
        self.slots = itertools.cycle(slots)


def _key(number: int, rank: int) -> str:
    return f"{number}/mesh/{rank}"
