"""A small coordinator for the simulation, with the real coordinator's rules for generations and commits.

Its messages:

Begin      to every member, once the supervisors have agreed on a generation
Step       to every member, to start a step
Vote       from every member
Committed  to every member, once all have voted
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from recycle_pp.consensus.agreement import Deposed
from recycle_pp.consensus.agreement_gate import AgreementGate
from recycle_pp.consensus.leader_lease import LeaderLease
from recycle_pp.coordinator import failover_discovery
from recycle_pp.protocol.events import Send
from recycle_pp.wire.messages.agreement import Place
from recycle_pp.wire.messages.generations import Adopt, Shares
from recycle_pp.wire.messages.handshake import SupervisorHello
from recycle_pp.wire.messages.supervisors import (
    FROM_SUPERVISOR,
    CoordinatorHeartbeat,
    Finish,
    Registration,
    SupervisorWelcome,
)

from .network import Peer

if TYPE_CHECKING:
    from .simulation import Simulation


class Begin(NamedTuple):
    """Starts an agreed generation. resetting: members whose workers drop their state and copy that of the others."""

    generation: int
    commits: dict[int, int]
    resetting: set[int]


class Step(NamedTuple):
    generation: int
    step: int


class Vote(NamedTuple):
    generation: int
    step: int


class Committed(NamedTuple):
    generation: int
    step: int


class Coordinator:
    """Has the part of the interface of `coordinator.Host` that `Leadership` uses."""

    def __init__(self, simulation: Simulation, agreement: Any, leader: Any, takeover: Any, job_id: str) -> None:
        self._simulation, self._agreement, self._leader = simulation, agreement, leader
        self._settings = simulation.settings
        self._job_id = job_id
        self.stood_down, self.agents = False, {0}
        self._lease = LeaderLease(agreement, self._settings.control.suspicion)
        self._gate = AgreementGate(agreement, self._lease, self._deliver)
        self._present: dict[int, tuple[Peer, Place]] = {}
        self._unheard: dict[int, int] = {}
        self._discovery = failover_discovery.FailoverDiscovery("") if takeover else None
        self._generation, self._begun = -1, False
        self._commits: dict[int, int] = {}  # step -> generation
        self._resetting: set[int] = set()  # ranks whose workers start from the state of the others
        self._members: set[int] = set()
        self._votes: set[int] = set()
        self._over = asyncio.Event()
        self._code = 0
        self.ended = asyncio.ensure_future(self._run())
        self._loss = asyncio.ensure_future(self._stand_down_when_lost())

    async def _run(self) -> int:
        if self._discovery is not None:
            with suppress(Deposed):
                await self._take_over(self._discovery)
        beat = asyncio.ensure_future(self._beat())
        await self._over.wait()
        beat.cancel()
        if not self.stood_down:
            for peer, _ in self._present.values():
                peer.send(Finish(self._code))
        self._gate.close()
        return self._code

    async def _take_over(self, discovery: Any) -> None:
        places = await self._agreement.supervisors()
        beating = asyncio.ensure_future(discovery.beat(self._lease))
        try:
            await discovery.complete(places, self._settings.control.suspicion)
            await self._lease.wait()
        finally:
            beating.cancel()
        discovery.over.set()
        for number, (peer, said) in discovery.supervisors.items():
            self._present[number] = (peer, said.place)
            self._unheard[number] = 0
        nodes = [self._simulation.nodes[number] for number in self._present]
        self._generation = max((node.generation for node in nodes), default=-1)
        for node in nodes:
            self._commits |= node.applied
        self._begun = True
        self._regroup()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._settings.control.heartbeat)
            await self._lease.wait()
            for number, (peer, _) in list(self._present.items()):
                peer.send(CoordinatorHeartbeat())
                self._unheard[number] += 1
                if self._unheard[number] * self._settings.control.heartbeat > self._settings.control.suspicion:
                    peer.abort()

    async def handle(self, peer: Peer) -> None:
        with suppress(Deposed):
            await self._handle(peer)

    async def _handle(self, peer: Peer) -> None:
        assert isinstance(peer.hello, SupervisorHello)
        await self._lease.wait()
        number = peer.hello.rank
        peer.set_keepalive(self._settings.control.suspicion)
        peer.send(SupervisorWelcome(self._settings, "/nowhere", self._leader, number, self._job_id))
        async for message in peer.listen(FROM_SUPERVISOR):
            await self._lease.wait()
            self._unheard[number] = 0
            if isinstance(message, Registration):
                if self._discovery is not None and not self._discovery.over.is_set():
                    self._discovery.receive(number, message, peer)
                else:
                    self._enters(number, peer, message.place)
            elif isinstance(message, Vote) and self._present.get(number, (None,))[0] is peer:
                self._votes_for(number, message)
        await self._lease.wait()
        if self._discovery is not None and not self._discovery.over.is_set():
            self._discovery.lost(number, peer)
        elif self._present.get(number, (None,))[0] is peer:
            del self._present[number]
            self._regroup()

    def _enters(self, number: int, peer: Peer, place: Place) -> None:
        self._present[number] = (peer, place)
        self._resetting.add(number)
        if self._begun:
            self._regroup()
        elif len(self._present) == self._simulation.order.supervisors:
            self._begun = True
            self._simulation.begun = True
            self._regroup()

    def _regroup(self) -> None:
        if not self._begun or self._over.is_set():
            return
        self._generation += 1
        self._members, self._votes = set(self._present), set()
        self._gate.announce(self._generation, {n: place for n, (_, place) in self._present.items()})
        self._gate.send([Send(0, Adopt(self._generation, {}, None, [], None, False, Shares([], [], True, [], None)))])

    def _deliver(self, out: Sequence[Send]) -> None:
        if out:
            begin = Begin(self._generation, dict(self._commits), self._resetting & self._members)
            for number in self._members:
                self._present[number][0].send(begin)
            self._resetting -= self._members
            self._simulation.agreed(self._agreement, self._generation, self._members | {self._leader.rank})
            self._ask()

    def _ask(self) -> None:
        for number in self._members:
            self._present[number][0].send(Step(self._generation, len(self._commits)))

    def _votes_for(self, number: int, vote: Vote) -> None:
        if vote == (self._generation, len(self._commits)) and number in self._members:
            self._votes.add(number)
            if self._votes == self._members:
                commit = Committed(self._generation, len(self._commits))
                self._simulation.commits(self._leader.term, commit.step)
                for each in self._members:
                    self._present[each][0].send(commit)
                self._commits[len(self._commits)] = self._generation
                self._votes = set()
                self._ask()

    def stop(self, reason: str, code: int = 1) -> None:
        self._simulation.record(f"rank {self._leader.rank} stops the job: {reason}")
        self._code = code
        self._over.set()

    async def _stand_down_when_lost(self) -> None:
        await self._lease.lost()
        self.stand_down()

    def stand_down(self) -> None:
        self.stood_down = True
        self._lease.revoke()
        self._gate.close()
        self._over.set()

    def report(self) -> str:
        return ""

    def close(self) -> None:
        self._lease.revoke()
        self.ended.cancel()
