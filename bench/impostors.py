"""Simulated supervisors and workers, which send real messages but compute nothing, to benchmark the coordinator.

    process = multiprocessing.get_context("spawn").Process(target=impersonate, args=(settings, port, theirs))
    ours.send([5])                      # the worker of rank 5 dies, and restarts on request

All ranks of a job share one process and one event loop. They use real connections to `HOST`:port.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import suppress
from typing import Any

import msgspec
from recycle_schedules import Worker

from recycle_pp.config.settings import Settings
from recycle_pp.protocol.ballot import make_vote
from recycle_pp.protocol.holdings import Holdings
from recycle_pp.protocol.participant import Participant
from recycle_pp.timing.packing import pack
from recycle_pp.wire.connection import Peer, connect
from recycle_pp.wire.messages.agreement import Place
from recycle_pp.wire.messages.generations import Adopt, Announce, SteadyPlan
from recycle_pp.wire.messages.handshake import SupervisorHello, WorkerHello
from recycle_pp.wire.messages.lifecycle import Donate, Exit, Ready, Synced, WorkerHeartbeat, WorkerWelcome
from recycle_pp.wire.messages.steps import Commit, Measured
from recycle_pp.wire.messages.supervisors import (
    TO_SUPERVISOR,
    Death,
    Died,
    Dying,
    Finish,
    Registration,
    Spawn,
    Spawned,
    SupervisorHeartbeat,
    SupervisorWelcome,
)
from recycle_pp.wire.messages.units import UnitId
from recycle_pp.wire.messages.workers import TO_WORKER, State

TOKEN, HOST = "of the bench", "127.0.0.1"
STEP_SECONDS = 0.05
UNITS = 100  # units per stage, in one layer; a unit has a million elements


def impersonate(settings: Settings, port: int, orders: Any) -> None:
    with suppress(KeyboardInterrupt):
        asyncio.run(Impostors(settings, port, orders).run())


class Impostors:
    def __init__(self, settings: Settings, port: int, orders: Any) -> None:
        self.settings, self.port, self._orders = settings, port, orders
        ranks = settings.parallel.pipelines * settings.parallel.stages
        self.supervisors = [FakeSupervisor(self, rank) for rank in range(ranks)]
        self.workers: dict[int, FakeWorker] = {}  # by member

    async def run(self) -> None:
        tasks = [asyncio.create_task(supervisor.run()) for supervisor in self.supervisors]
        while tasks:
            await asyncio.sleep(0.01)
            if self._orders.poll():
                for rank in self._orders.recv():
                    self.supervisors[rank].worker_dies()


class FakeSupervisor:
    def __init__(self, all: Impostors, rank: int) -> None:
        self._all, self._rank = all, rank
        self._peer: Peer | None = None
        self._order: Spawn | None = None
        self._worker: FakeWorker | None = None
        self._deaths: list[Died] = []

    async def run(self) -> None:
        while True:
            with suppress(OSError):
                hello = SupervisorHello(self._rank, "here", 1, 0)
                self._peer = await connect(HOST, self._all.port, TOKEN, hello)
                beats = asyncio.create_task(self._beat(self._peer))
                async for message in self._peer.listen(TO_SUPERVISOR):
                    self._hear(message)
                beats.cancel()
            await asyncio.sleep(0.2)

    async def _beat(self, peer: Peer) -> None:
        while True:
            await asyncio.sleep(self._all.settings.control.heartbeat)
            peer.send(SupervisorHeartbeat(None))

    def _hear(self, message: Any) -> None:
        assert self._peer is not None
        match message:
            case SupervisorWelcome():
                place = Place(HOST, self._all.port)  # needs a listening server, or the supervisor counts as dead
                self._peer.send(Registration(place, self._order, self._worker is not None, self._deaths))
            case Spawn():
                self._order = message
                if self._worker is not None:
                    self._worker.end()
                self._worker = FakeWorker(self._all, self._rank, message)
                self._peer.send(Spawned(message.incarnation, 1))
            case Finish():
                sys.exit(0)

    def worker_dies(self) -> None:
        worker, self._worker = self._worker, None
        assert worker is not None and self._peer is not None
        worker.end()
        died = Died(worker.incarnation, Death("signal", "SIGKILL", time.monotonic()), False)
        self._deaths = [*self._deaths, died][-3:]
        self._peer.send(Dying(worker.incarnation, time.monotonic()))
        self._peer.send(died)


class FakeWorker:
    def __init__(self, all: Impostors, rank: int, order: Spawn) -> None:
        self._all, self._rank, self.incarnation = all, rank, order.incarnation
        parallel = all.settings.parallel
        self._me, self._total = Worker(*order.worker), parallel.pipelines * parallel.microbatches
        self._spans = pack([
            [kind, self._me.pipeline, i, float(i), i + 1.0] for i in range(parallel.microbatches) for kind in "FIW"
        ])  # fmt: skip
        self._last = self._me.stage == parallel.stages - 1
        self._units = [UnitId(self._me.stage, number) for number in range(UNITS)]
        self.member = Participant(rank, self._me, Holdings(rank, self._units, -1))
        self._peer: Peer | None = None
        self._ready: Ready | None = None
        self._voted = (-1, -1)
        self._joins: list[tuple[FakeWorker, int]] = []
        all.workers[rank] = self
        self._task = asyncio.create_task(self._run())

    def end(self) -> None:
        self._task.cancel()
        if self._peer is not None:
            self._peer.abort()

    async def _run(self) -> None:
        while True:
            with suppress(OSError):
                moved = self._ready is not None
                hello = WorkerHello(self._rank, self.incarnation, moved)
                self._peer = await connect(HOST, self._all.port, TOKEN, hello)
                if moved:
                    state: State = self.member.state(linked=True)
                    self._peer.send(msgspec.structs.replace(state, said=[self._ready]))
                async for message in self._peer.listen(TO_WORKER):
                    self._hear(message)
            await asyncio.sleep(0.2)

    def _say(self, message: Any) -> None:
        if self._peer is not None:
            self._peer.send(message)

    def _hear(self, message: Any) -> None:
        match message:
            case WorkerWelcome():
                self.member.caught_up(message.resume - 1, self._units)
                units = {self._me.stage: [(str(unit), 1 << 20) for unit in self._units]}
                self._ready = Ready((HOST, 1), "impostor", units=units)
                self._say(self._ready)
            case Announce():
                self._say(self.member.announce(message))
            case Adopt():
                self.member.adopt(message)
            case SteadyPlan():
                self.member.plan(message)
                asyncio.get_running_loop().call_later(STEP_SECONDS, self._vote)
            case Commit():
                self.member.commit(message)
                self.member.next_commit()
                self.member.applied = message.step
                for joiner, session in self._joins:
                    joiner.follow(message.step, session)
                self._joins = [] if message.hold else self._joins
                asyncio.get_running_loop().call_later(STEP_SECONDS, self._vote)
            case Donate():
                joiner = self._all.workers[message.to]
                self._joins.append((joiner, message.session))
                joiner.follow(self.member.applied, message.session)
            case Exit():
                self.end()

    def follow(self, step: int, session: int) -> None:
        if self.member.generation < 0:
            self.member.caught_up(step, self._units)
            self._say(Synced(step, session))

    def _vote(self) -> None:
        orders, step = self.member.orders, self.member.committed + 1
        if orders is None or orders.steady is None or self._voted == (orders.generation, step):
            return
        self._voted = orders.generation, step
        self.member.record(step).reduced = True
        self._say(WorkerHeartbeat(time.monotonic(), "elsewhere"))
        self._say(Measured(step, self._spans, [], 0, 1e-4, float(step)))
        losses = [2.0] * self._total if self._last else []
        counts, speaks = [1.0] * self._total, self.member.speaks
        self._say(make_vote(orders.generation, step, [0.1] * 60, True, True, counts, losses, speaks))
