"""A new coordinator finds the processes of the job again.

    discovery = FailoverDiscovery(token)
    discovery.supervisor(3, message, peer)         # as they come: what the supervisor of rank 3 says of itself,
    discovery.worker(3, incarnation, state, peer)  # and its worker
    await discovery.complete(places, patience)     # all have come who can
    discovery.states()                             # what `protocol.takeover.find` asks for
    discovery.ranks(pipelines, stages)             # everybody, the missing ones too
    discovery.said()                               # what workers say again

A supervisor whose port refuses connections for a while is dead (`consensus.refusal`). One that gives no answer is not
waited for long: if it lives it comes later, as one that returns. One that answers, and a worker that took part, are
waited for as long as a worker may be silent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from recycle_schedules import Worker

from recycle_pp.consensus.refusal import REFUSED, Refusal
from recycle_pp.protocol.takeover import find
from recycle_pp.wire.connection import Peer, connect
from recycle_pp.wire.messages.agreement import Place
from recycle_pp.wire.messages.handshake import CandidateHello
from recycle_pp.wire.messages.supervisors import CoordinatorHeartbeat, Died, Present
from recycle_pp.wire.messages.table import Message
from recycle_pp.wire.messages.workers import State

from .ranks import NODE_LOSS, Rank

LATE = 5.0  # seconds after which a supervisor that neither comes nor answers is no longer waited for
_BEAT = 0.5  # seconds between two signs of life to those who wait
_LOOK = 0.005  # seconds


class Supervisor(NamedTuple):
    """A supervisor's connection, and what it said of itself last."""

    peer: Peer
    said: Present


class Known(NamedTuple):
    """A worker's connection, the process that it comes from, and its state."""

    peer: Peer
    incarnation: int
    state: State


class FailoverDiscovery:
    def __init__(self, token: str) -> None:
        self._token = token
        self.supervisors: dict[int, Supervisor] = {}
        self.workers: dict[int, Known] = {}
        self.over = asyncio.Event()  # whoever comes from now on is late

    def supervisor(self, number: int, message: Present, peer: Peer) -> None:
        self.supervisors[number] = Supervisor(peer, message)

    def died(self, number: int, message: Died) -> None:
        """A worker has died meanwhile."""
        if number in self.supervisors:
            peer, said = self.supervisors[number]
            said = msgspec.structs.replace(said, alive=False, deaths=[*said.deaths, message])
            self.supervisors[number] = Supervisor(peer, said)

    def worker(self, number: int, incarnation: int, state: State, peer: Peer) -> None:
        self.workers[number] = Known(peer, incarnation, state)

    async def complete(self, places: Mapping[int, Place], patience: float) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        gone, answer = set[int](), set[int]()
        beaten = begun
        probes = [
            asyncio.create_task(self._probe(number, place, patience, gone, answer)) for number, place in places.items()
        ]
        while True:
            waited = loop.time() - begun
            missing = places.keys() - self.supervisors.keys() - gone
            late = missing & answer or self._awaited() if waited > LATE else missing or self._awaited()
            if not late or waited > patience:
                break
            if loop.time() - beaten > _BEAT:
                beaten = loop.time()
                for supervisor in self.supervisors.values():
                    supervisor.peer.send(CoordinatorHeartbeat())
            await asyncio.sleep(_LOOK)
        for probe in probes:
            probe.cancel()

    def states(self) -> dict[Worker, State]:
        """By worker; of those that still are the process that their supervisor has started last."""
        roles = self._alive()
        return {roles[number]: self.workers[number].state for number in self._here()}

    def said(self) -> list[tuple[int, Message]]:
        """(rank, message) of all lasting messages that workers repeat to a successor."""
        return [(number, message) for number in self._here() for message in self.workers[number].state.said]

    def ranks(self, pipelines: int, stages: int) -> list[Rank]:
        """Every rank with its place in the job; those that nobody has heard of get what is left."""
        free = {Worker(d, s) for d in range(pipelines) for s in range(stages)}
        found: dict[int, Rank] = {}
        for number, (peer, said) in sorted(self.supervisors.items()):
            rank = found[number] = Rank(number, Worker(*divmod(number, stages)), peer, said.place)
            if spawn := said.spawn:
                rank.role = Worker(*spawn.worker)
                rank.incarnation = spawn.incarnation
                rank.respawns = spawn.respawns
            rank.alive = said.alive
            rank.worker = self.workers[number].peer if number in self._here() else None
            rank.causes = {died.incarnation: died.death for died in said.deaths}
            free.discard(rank.role)
        for number in range(pipelines * stages):
            if number not in found:
                role = Worker(*divmod(number, stages))
                role = role if role in free else min(free)
                free.discard(role)
                found[number] = Rank(number, role, incarnation=0, causes={0: NODE_LOSS})
        return list(found.values())

    def _alive(self) -> dict[int, Worker]:
        """By rank, the workers that live, as their supervisors say."""
        known = {number: of.said for number, of in self.supervisors.items()}
        return {number: Worker(*said.spawn.worker) for number, said in known.items() if said.alive and said.spawn}

    def _here(self) -> list[int]:
        """Ranks whose worker has come, and is the process that its supervisor knows."""
        spawns = {number: self.supervisors[number].said.spawn for number in self._alive()}
        alive = {number: spawn.incarnation for number, spawn in spawns.items() if spawn}
        return [number for number, worker in self.workers.items() if alive.get(number) == worker.incarnation]

    def _awaited(self) -> set[int]:
        """Ranks whose worker took part and lives, as its supervisor says, and has not come."""
        members = find(self.states()).members
        return {n for n, role in self._alive().items() if role in members or not self.workers} - self.workers.keys()

    async def _probe(self, number: int, place: Place, patience: float, gone: set[int], answer: set[int]) -> None:
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
