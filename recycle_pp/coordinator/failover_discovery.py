"""Finds the processes of a running job for a new coordinator.

    discovery = FailoverDiscovery(token)
    discovery.receive(3, message, peer)            # rank 3's supervisor has registered, or reports a death or a signal
    discovery.lost(3, peer)                        # this supervisor's connection ended
    discovery.worker(3, incarnation, state, peer)  # the report of rank 3's worker
    await discovery.beat(lease)                    # sends heartbeats to supervisors until it is cancelled
    await discovery.complete(places, patience)     # waits until all reachable processes have reported
    discovery.states()                             # for `protocol.takeover.find`
    discovery.alive                                # whether any worker is alive, according to its supervisor
    discovery.assignment(pipelines, stages)        # member -> the worker that it plays
    discovery.fill(roster, size)                   # adds all ranks to the roster, including missing ones
    discovery.repeated()                           # messages that workers have resent
    discovery.signals()                            # signals that supervisors have reported

The discovery waits up to `patience` seconds for supervisors that accept connections but have not registered, and for
live workers that took part in the job. For supervisors that do not answer, it waits only LATE seconds, because a live
one can still register later. A supervisor whose port refuses connections for some time counts as dead
(`consensus.refusal`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from recycle_schedules import Worker

from recycle_pp.consensus.leader_lease import LeaderLease
from recycle_pp.consensus.refusal import REFUSED, Refusal
from recycle_pp.protocol.assignment import spawned
from recycle_pp.protocol.takeover import find
from recycle_pp.wire.connection import Peer, connect
from recycle_pp.wire.messages.agreement import Place
from recycle_pp.wire.messages.handshake import CandidateHello
from recycle_pp.wire.messages.members import Assignment, Member
from recycle_pp.wire.messages.supervisors import CoordinatorHeartbeat, Died, Registration, Stopping
from recycle_pp.wire.messages.table import Message
from recycle_pp.wire.messages.workers import State

from .ranks import NODE_LOSS
from .roster import Roster

LATE = 5.0  # seconds to wait for supervisors that neither register nor accept connections
_BEAT = 0.5  # seconds between two heartbeats to connected supervisors
_LOOK = 0.005  # seconds between checks for whether all processes have reported


class Supervisor(NamedTuple):
    """A supervisor's connection and its last report."""

    peer: Peer
    report: Registration


class Known(NamedTuple):
    """A worker's connection, incarnation and state."""

    peer: Peer
    incarnation: int
    state: State


class FailoverDiscovery:
    def __init__(self, token: str) -> None:
        self._token = token
        self.supervisors: dict[int, Supervisor] = {}
        self.workers: dict[int, Known] = {}
        self._signals: dict[tuple[int, bool], Stopping] = {}  # by rank and `again`: reconnected supervisors repeat them
        self.over = asyncio.Event()  # set by the successor once it has restored the job

    def receive(self, number: int, message: Message, peer: Peer) -> None:
        if isinstance(message, Registration):
            self.supervisors[number] = Supervisor(peer, message)
        elif isinstance(message, Died) and number in self.supervisors:
            known, report = self.supervisors[number]
            # While an earlier process dies, `alive` already means the next one.
            alive = report.alive and report.spawn is not None and message.incarnation < report.spawn.incarnation
            report = msgspec.structs.replace(report, alive=alive, deaths=[*report.deaths, message])
            self.supervisors[number] = Supervisor(known, report)
        elif isinstance(message, Stopping):
            self._signals[number, message.again] = message

    def lost(self, number: int, peer: Peer) -> None:
        if number in self.supervisors and self.supervisors[number].peer is peer:
            del self.supervisors[number]

    def worker(self, number: int, incarnation: int, state: State, peer: Peer) -> None:
        self.workers[number] = Known(peer, incarnation, state)

    async def beat(self, lease: LeaderLease) -> None:
        """Sends heartbeats to connected supervisors until cancelled, so that they do not elect another coordinator."""
        while True:
            await asyncio.sleep(_BEAT)
            for supervisor in self.supervisors.values() if lease.held else ():
                supervisor.peer.send(CoordinatorHeartbeat())

    async def complete(self, places: Mapping[int, Place], patience: float) -> None:
        """Waits until all expected processes have reported, for at most `patience` seconds.

        places: rank -> address of its supervisor
        """
        loop = asyncio.get_running_loop()
        begun = loop.time()
        gone, answer = set[int](), set[int]()
        probes = [
            asyncio.create_task(self._probe(number, place, patience, gone, answer)) for number, place in places.items()
        ]
        while True:
            waited = loop.time() - begun
            missing = places.keys() - self.supervisors.keys() - gone
            late = missing & answer or self._awaited() if waited > LATE else missing or self._awaited()
            if not late or waited > patience:
                break
            await asyncio.sleep(_LOOK)
        for probe in probes:
            probe.cancel()

    def states(self) -> dict[Member, State]:
        """member -> its worker's state. Leaves out workers that are not their supervisor's current process."""
        return {number: self.workers[number].state for number in self._here()}

    @property
    def alive(self) -> bool:
        return bool(self._alive())

    def repeated(self) -> list[tuple[int, Message]]:
        """(rank, message) for each lasting message that a worker has resent."""
        return [(number, message) for number in self._here() for message in self.workers[number].state.said]

    def signals(self) -> list[tuple[int, Stopping, Peer]]:
        """(rank, message, its sender) for each signal that a connected supervisor has reported."""
        here = self.supervisors
        return [(number, of, here[number].peer) for (number, _), of in self._signals.items() if number in here]

    def assignment(self, pipelines: int, stages: int) -> Assignment:
        """member -> the worker that it plays, according to the newest `Spawn` that its supervisor has received. Members
        whose supervisor is missing get the remaining workers."""
        spawns = {number: of.report.spawn for number, of in self.supervisors.items()}
        orders = {number: Worker(*spawn.worker) for number, spawn in spawns.items() if spawn}
        live = [number for number, of in self.supervisors.items() if of.report.alive]
        return spawned(orders, live, pipelines, stages)

    def fill(self, roster: Roster, size: int) -> None:
        """Adds the ranks of all `size` launched processes to the roster."""
        here = self._here()
        for number in range(size):
            rank = roster.enter(number)
            if number not in self.supervisors:
                rank.incarnation, rank.causes = 0, {0: NODE_LOSS}
                continue
            rank.supervisor, report = self.supervisors[number]
            rank.place, rank.alive = report.place, report.alive
            if spawn := report.spawn:
                rank.incarnation = spawn.incarnation
                rank.respawns = spawn.respawns
            rank.worker = self.workers[number].peer if number in here else None
            rank.causes = {died.incarnation: died.death for died in report.deaths}

    def _alive(self) -> dict[Member, int]:
        """member -> incarnation, for each worker that is alive according to its supervisor."""
        reports = {number: supervisor.report for number, supervisor in self.supervisors.items()}
        return {number: of.spawn.incarnation for number, of in reports.items() if of.alive and of.spawn}

    def _here(self) -> list[Member]:
        """Members whose worker has reported, and is still its supervisor's current process."""
        alive = self._alive()
        return [number for number, worker in self.workers.items() if alive.get(number) == worker.incarnation]

    def _awaited(self) -> set[Member]:
        """Members whose worker took part in the job, is alive according to its supervisor, and has not reported. Until
        the reports show which workers took part, every live worker counts as one of them."""
        members = find(self.states()).members
        return {number for number in self._alive() if number in members or not members} - self.workers.keys()

    async def _probe(self, number: int, place: Place, patience: float, gone: set[int], answer: set[int]) -> None:
        """Connects to a supervisor's port repeatedly, until the supervisor registers. Adds its rank to `answer` if it
        accepts a connection, and to `gone` if it counts as dead."""
        refusal = Refusal(min(REFUSED, patience))
        while number not in self.supervisors:
            try:
                (await connect(place.host, place.port, self._token, CandidateHello(), patience)).abort()
                answer.add(number)
            except ConnectionRefusedError:
                if refusal.lasts(place.process):
                    gone.add(number)
                    return
            except OSError:
                refusal.reset()
            await asyncio.sleep(10 * _LOOK)
