"""Follows the leader of the job, or hosts the coordinator if this supervisor is the leader.

    leadership = Leadership(start_host, disconnect)
    await leadership.start(agreement)                  # first leader of a job: hosts the coordinator
    leadership.join(agreement, leader)                 # other supervisors, after the welcome of `leader`
    peer = await leadership.follow(connect)            # after a lost connection: connects to the next coordinator
    await leadership.admit(peer)                       # a supervisor, a worker or an operator has connected
    leadership.close()

All supervisors learn of a leader before it starts its coordinator. The coordinator's modules are imported in a thread;
peers that connect meanwhile wait. An old leader steps down when it learns of a newer leader. Its coordinator ends
without sending a message. Its peers and the supervisor itself then reconnect to the new coordinator.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from recycle_pp.consensus.agreement import Agreement
from recycle_pp.consensus.refusal import REFUSED, Refusal
from recycle_pp.wire.connection import Peer
from recycle_pp.wire.messages.agreement import Leader, Takeover
from recycle_pp.wire.messages.ctl import Elsewhere
from recycle_pp.wire.messages.handshake import OperatorHello, SupervisorHello
from recycle_pp.wire.messages.supervisors import CoordinatorHeartbeat, Redirect

if TYPE_CHECKING:
    from recycle_pp.coordinator.host import Host

CONNECT_SECONDS = 10.0
RECONNECT_SECONDS = 1.0  # time limit for reconnecting to a coordinator that may be lost
GRACE_SECONDS = 1.0  # how much earlier than this supervisor a peer may learn of a new leader
BEAT_SECONDS = 0.5  # seconds between two heartbeats to a waiting supervisor
RETRY_SECONDS = 0.05  # seconds between two attempts to connect

StartHost = Callable[[Leader, Takeover | None], Awaitable["Host"]]
Connect = Callable[[Leader, float], Awaitable[Peer]]  # leader, seconds allowed; raises OSError


class Leadership:
    """This supervisor's relation to the leader of the job.

    start_host(leader, takeover)  starts the coordinator in this supervisor
    disconnect()                  closes this supervisor's connection to the coordinator, so that it calls `follow`
    """

    def __init__(self, start_host: StartHost, disconnect: Callable[[], None]) -> None:
        self.leader: Leader | None = None
        self.host: Host | None = None
        self.agreement: Agreement | None = None
        self.redirected = False  # whether the presumed leader has sent `Redirect`, as it does not coordinate (yet)
        self._start_host = start_host
        self._disconnect = disconnect
        self._starting = False  # whether the coordinator is being started here
        self._hosting = asyncio.Event()
        self._peers: set[Peer] = set()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, agreement: Agreement) -> None:
        """Becomes the first leader. Raises LostMajority if another job with the same token uses the same etcd."""
        self.agreement = agreement
        leader = await agreement.leader(after=-1)
        self.join(agreement, leader)
        await self._start_coordinator(leader, None)

    def join(self, agreement: Agreement, leader: Leader) -> None:
        self.agreement = agreement
        self.leader = leader
        self._tasks.append(asyncio.create_task(self._watch(agreement, leader)))

    async def follow(self, connect: Connect, refused: float = REFUSED) -> Peer:
        """Reconnects to the current coordinator if it is alive. Otherwise connects to the next coordinator, which may
        be this supervisor's own.

        refused: seconds of refused connections after which the current coordinator counts as dead

        Raises LostMajority if no other leader can be elected.
        """
        loop = asyncio.get_running_loop()
        assert self.agreement is not None and self.leader is not None
        lost = self.leader
        lost_at = loop.time()
        redirected = self.redirected
        self.redirected = False
        may_live = not redirected and (not self.agreement.is_me(lost) or self.host is not None)
        if may_live and (peer := await self._reconnect(connect, lost, refused)) is not None:
            return peer
        while True:
            leader = self.leader = await self.agreement.leader(after=self.leader.term)
            if self.agreement.is_me(leader) and self.host is None:
                await self._start_coordinator(leader, Takeover(leader.rank, lost.rank, lost_at, loop.time()))
            with suppress(OSError):
                return await connect(leader, CONNECT_SECONDS)
            await asyncio.sleep(RETRY_SECONDS)

    async def _reconnect(self, connect: Connect, lost: Leader, refused: float) -> Peer | None:
        """A new connection to the same coordinator; None if this coordinator is silent or dead."""
        assert self.agreement is not None
        place = (await self.agreement.supervisors()).get(lost.rank)
        refusal = Refusal(refused)
        while True:
            try:
                return await connect(lost, RECONNECT_SECONDS)
            except TimeoutError:
                return None
            except OSError:  # refused, or reset before it was authenticated
                if refusal.lasts(place.process if place else ""):
                    return None
            await asyncio.sleep(RETRY_SECONDS)

    async def admit(self, peer: Peer) -> None:
        """Serves a peer until its connection ends. If this supervisor does not lead, redirects the peer, unless it is a
        worker.

        Waits `GRACE_SECONDS` before it redirects, because a peer may learn earlier than this supervisor that this
        supervisor was elected.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + GRACE_SECONDS
        while self.host is None:
            if self.leader is not None and not self._starting and loop.time() > deadline:
                assert self.agreement is not None
                leader = None if self.agreement.is_me(self.leader) else self.leader
                if isinstance(peer.hello, SupervisorHello):
                    peer.send(Redirect(leader))
                elif isinstance(peer.hello, OperatorHello):  # workers get the address from their supervisors
                    peer.send(Elsewhere(leader))
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._hosting.wait(), BEAT_SECONDS)
            if isinstance(peer.hello, SupervisorHello) and self.host is None:
                peer.send(CoordinatorHeartbeat())
        self._peers.add(peer)
        try:
            await self.host.handle(peer)
        finally:
            self._peers.discard(peer)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self.host is not None:
            self.host.close()
        if self.agreement is not None:
            self.agreement.close()

    async def _start_coordinator(self, leader: Leader, takeover: Takeover | None) -> None:
        self._starting = True
        try:
            self.host = await self._start_host(leader, takeover)
        finally:
            self._starting = False
        self._hosting.set()
        self._tasks.append(asyncio.create_task(self._until_deposed(self.host)))

    async def _until_deposed(self, host: Host) -> None:
        """Steps down if the agreement refuses a decision of this coordinator."""
        await asyncio.wait({host.ended})
        if host.stood_down:
            self._step_down()

    async def _watch(self, agreement: Agreement, known: Leader) -> None:
        """Disconnects from a leader that has a successor. If this supervisor is the old leader, it steps down."""
        while True:
            known = await agreement.successor(known)
            if self.leader is None or known.term <= self.leader.term:
                continue
            if known == self.leader._replace(term=known.term):  # the same leader in a later term
                self.leader = known
                continue
            self._step_down()
            self.redirected = True
            self._disconnect()

    def _step_down(self) -> None:
        host = self.host
        self.host = None
        self._hosting.clear()
        if host is not None:
            host.stand_down()
        for peer in self._peers:
            peer.abort()
