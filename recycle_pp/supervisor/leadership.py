"""Who coordinates the job, as one supervisor acts on it: it follows, or it leads and hosts the coordinator itself.

    leadership = Leadership(start_host, leave)
    await leadership.found(rank, agreement)            # the first one of a job: hosts
    leadership.join(rank, agreement, leader)           # any other: `leader` has welcomed it
    peer = await leadership.follow(connect)            # the connection to the coordinator was lost: one to the next
    await leadership.admit(peer)                       # a supervisor or a worker has come, to whoever coordinates
    leadership.close()

A leader is told to everybody before anything else is done. What it takes to coordinate is imported in a thread, and
whoever comes meanwhile waits. When a later leader is known, this one gives way: its coordinator ends without a word,
its guests go to the later one, and so does this supervisor, as one of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from recycle_pp.consensus.agreement import Agreement
from recycle_pp.consensus.refusal import REFUSED, Refusal
from recycle_pp.telemetry.succession import Succession
from recycle_pp.wire.connection import Peer
from recycle_pp.wire.messages.agreement import Leader
from recycle_pp.wire.messages.handshake import SupervisorHello
from recycle_pp.wire.messages.supervisors import CoordinatorHeartbeat, Redirect

if TYPE_CHECKING:
    from recycle_pp.coordinator.host import Host

CONNECT_SECONDS = 10.0
RETURN_SECONDS = 1.0  # for the answer of a coordinator that may be lost
HEARSAY_SECONDS = 1.0  # that others may know earlier who coordinates
BEAT_SECONDS = 0.5  # between two signs of life to a supervisor that waits
AGAIN_SECONDS = 0.05  # between two times of calling on a leader that cannot be reached

StartHost = Callable[[Leader, Succession | None], Awaitable["Host"]]
Connect = Callable[[Leader, float], Awaitable[Peer]]  # within so many seconds; OSError


class Leadership:
    """leave(): this supervisor is to give up its present connection, and to `follow`."""

    def __init__(self, start_host: StartHost, leave: Callable[[], None]) -> None:
        self.leader: Leader | None = None
        self.host: Host | None = None
        self.agreement: Agreement | None = None
        self.sent_away = False  # by the leader itself: it coordinates no more, or not yet
        self._start_host, self._leave = start_host, leave
        self._rank = -1
        self._begins = False  # it leads, and gets ready to host
        self._hosts = asyncio.Event()
        self._guests: set[Peer] = set()
        self._tasks: list[asyncio.Task[None]] = []

    async def found(self, rank: int, agreement: Agreement) -> None:
        """LostMajority where another job has the same name."""
        self._rank, self.agreement = rank, agreement
        leader = await agreement.leader(after=-1)
        self.join(rank, agreement, leader)
        await self._begin(leader, None)

    def join(self, rank: int, agreement: Agreement, leader: Leader) -> None:
        self._rank, self.agreement, self.leader = rank, agreement, leader
        self._tasks.append(asyncio.create_task(self._watch(agreement, leader)))

    async def follow(self, connect: Connect, refused: float = REFUSED) -> Peer:
        """Connects to the next coordinator, which may be here, or to the same one, if only the connection was lost.

        refused: seconds of refused connections after which the present one counts as ended. LostMajority if there
        cannot be another one.
        """
        loop = asyncio.get_running_loop()
        assert self.agreement is not None and self.leader is not None
        lost, lost_at = self.leader, loop.time()
        sent_away, self.sent_away = self.sent_away, False
        may_live = not sent_away and (lost.rank != self._rank or self.host is not None)
        if may_live and (peer := await self._return(connect, lost, refused)) is not None:
            return peer
        while True:
            leader = self.leader = await self.agreement.leader(after=self.leader.term)
            if leader.rank == self._rank and self.host is None:
                await self._begin(leader, Succession(leader.term, leader.rank, lost.rank, lost_at, loop.time()))
            with suppress(OSError):
                return await connect(leader, CONNECT_SECONDS)
            await asyncio.sleep(AGAIN_SECONDS)

    async def _return(self, connect: Connect, lost: Leader, refused: float) -> Peer | None:
        """The connection to the same coordinator; None if it does not answer, or has ended."""
        assert self.agreement is not None
        place = (await self.agreement.supervisors()).get(lost.rank)
        refusal = Refusal(refused)
        while True:
            try:
                return await connect(lost, RETURN_SECONDS)
            except TimeoutError:
                return None
            except OSError:  # refused, or reset before it was authenticated
                if refusal.lasts(place.process if place else ""):
                    return None
            await asyncio.sleep(AGAIN_SECONDS)

    async def admit(self, peer: Peer) -> None:
        """Whoever comes while another rank coordinates hears where it is to go; it may also have heard earlier than
        this supervisor itself that it leads."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + HEARSAY_SECONDS
        while self.host is None:
            if self.leader is not None and not self._begins and loop.time() > deadline:
                if isinstance(peer.hello, SupervisorHello):  # who tells its worker
                    peer.send(Redirect(self.leader if self.leader.rank != self._rank else None))
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._hosts.wait(), BEAT_SECONDS)
            if isinstance(peer.hello, SupervisorHello) and self.host is None:
                peer.send(CoordinatorHeartbeat())
        self._guests.add(peer)
        try:
            await self.host.handle(peer)
        finally:
            self._guests.discard(peer)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self.host is not None:
            self.host.close()
        if self.agreement is not None:
            self.agreement.close()

    async def _begin(self, leader: Leader, succession: Succession | None) -> None:
        self._begins = True
        try:
            self.host = await self._start_host(leader, succession)
        finally:
            self._begins = False
        self._hosts.set()
        self._tasks.append(asyncio.create_task(self._until_deposed(self.host)))

    async def _until_deposed(self, host: Host) -> None:
        """By an agreement that was refused."""
        await asyncio.wait({host.ended})
        if host.gave_way:
            self._give_way()

    async def _watch(self, agreement: Agreement, known: Leader) -> None:
        """Nobody stays with a leader that has a successor; not the leader itself, which may not know it either."""
        while True:
            known = await agreement.superseded(known)
            if self.leader is None or known.term <= self.leader.term:
                continue
            if known.rank == self.leader.rank:  # it had to take a later term
                self.leader = known
                continue
            self._give_way()
            self.sent_away = True
            self._leave()

    def _give_way(self) -> None:
        host, self.host = self.host, None
        self._hosts.clear()
        if host is not None:
            host.give_way()
        for guest in self._guests:
            guest.abort()
