"""The embedded agreement: the supervisors vote for who coordinates, and acknowledge every membership.

    election = Election(rank=2, address=("127.0.0.1", 4711), token=token, leader=Leader(0, 0, "127.0.0.1", 4700))
    leader = await election.leader(after=0)
    await election.agree(generation=5, supervisors={1: place, 2: place})

As in Raft (Ongaro and Ousterhout, 2014): one vote a term, and none for a candidate whose membership is older than the
voter's own. The log is a single entry, the membership. A new one needs a majority of the last agreed one, of every one
that was proposed since, and of itself (Raft's joint consensus), so any two majorities that could decide something share
a supervisor. A candidate needs the same, unless it hears from enough of them that its newest membership was agreed,
which the leader may have had no time to say. The next in rank is the first candidate, the others wait for their turn. A
supervisor whose port refuses connections has died; where that leaves no majority nobody waits.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from recycle_pp.wire.connection import Peer, connect
from recycle_pp.wire.frames import encode
from recycle_pp.wire.messages.agreement import (
    TO_CANDIDATE,
    TO_VOTER,
    Agreed,
    Answer,
    Campaign,
    Leader,
    Leads,
    Membership,
    Place,
    Position,
    Propose,
)
from recycle_pp.wire.messages.handshake import CandidateHello
from recycle_pp.wire.messages.table import Message

from .agreement import LostMajority, majority

TURN = 0.2  # seconds that each later candidate waits longer
ROUND = 1.0  # seconds until a candidate without a majority gives way
ANSWER = 2.0  # seconds for an answer from a supervisor that may be cut off
AGAIN = 0.02  # seconds between two times of asking: it may not have noticed yet that the leader is gone

Roster = dict[int, Place]


class Election:
    """patience: seconds that others may take longer to notice a loss, and to acknowledge a membership."""

    def __init__(
        self, rank: int, address: Place, token: str, leader: Leader | None = None, patience: float = 10.0
    ) -> None:
        self._rank, self._address, self._token, self._patience = rank, address, token, patience
        self._leader: Leader | None = None
        self._lost, self._lost_rank = -1, -1  # term and rank of the leader that was lost
        self._term = -1  # newest term voted in or followed
        self._vote: int | None = None  # given in that term
        self._voted_at = float("-inf")
        self._led = asyncio.Event()
        # What the job is before any membership is agreed: its first leader alone.
        first = {leader.rank: (leader.host, leader.port)} if leader else {rank: address}
        begin = Membership((-1, -1), leader.rank if leader else rank, first)
        self._memberships = [begin]  # the last agreed, and those proposed since
        self._lines: dict[Place, _Line] = {}
        self._telling: set[asyncio.Task[None]] = set()
        self._handlers: dict[type[Message], Callable[[Any], bool]] = {
            Campaign: self._grants,
            Propose: self._acknowledges,
            Agreed: self._hears_agreed,
            Leads: self._hears_leader,
        }
        if leader is not None:
            self._follow(leader)

    async def leader(self, after: int) -> Leader:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience + 2 * ROUND
        self._lost = max(self._lost, after)
        if self._leader is not None and self._leader.term <= after:
            self._lost_rank, self._leader = self._leader.rank, None
            self._led.clear()
        lag = 0.0
        while self._leader is None:
            pause = max(TURN * self._turn() + lag, self._voted_at + ROUND - loop.time())
            with suppress(TimeoutError):
                await asyncio.wait_for(self._led.wait(), pause)
            if self._leader is None and loop.time() > deadline:
                raise LostMajority(
                    f"no majority of supervisors {_names(self._memberships[-1].roster)} has answered in time"
                )
            if self._leader is None:
                await self._campaign()
                lag = random.uniform(0, ROUND)  # two whose memberships differ may have had the same turn
        return self._leader

    async def agree(self, generation: int, supervisors: Mapping[int, Place]) -> None:
        leader = self._leader
        if leader is None or leader.rank != self._rank:
            raise LostMajority("another supervisor coordinates now")
        position = (leader.term, generation)
        self._memberships.append(Membership(position, self._rank, dict(supervisors)))
        try:
            async with asyncio.timeout(self._patience):
                await self._ask_all(Propose(leader, self._memberships))
        except TimeoutError:
            raise LostMajority(f"no majority of supervisors {_names(supervisors)} has answered in time") from None
        if self._leader != leader:
            raise LostMajority("another supervisor coordinates now")
        self._agreed(position)
        self._tell(Agreed(position))

    async def supervisors(self) -> Mapping[int, Place]:
        return self._memberships[-1].roster

    async def handle(self, peer: Peer) -> None:
        async for message in peer.listen(TO_VOTER):
            yes = self._handlers[type(message)](message)
            peer.send(Answer(yes, self._memberships[-1].position, self._leader))

    def close(self) -> None:
        for task in self._telling:
            task.cancel()
        for line in self._lines.values():
            line.close()

    # -- as a voter --------------------------------------------------------------------------------------------

    def _acknowledges(self, message: Propose) -> bool:
        if message.leader.term < self._term or not message.memberships:
            return False
        self._follow(message.leader)
        self._memberships = message.memberships
        return True

    def _hears_agreed(self, message: Agreed) -> bool:
        self._agreed(message.position)
        return True

    def _hears_leader(self, message: Leads) -> bool:
        self._follow(message.leader)
        return True

    def _grants(self, message: Campaign) -> bool:
        term, rank = message.term, message.rank
        if self._leader is not None:
            return False
        if term > self._term:  # also where the vote is refused: else two candidates could ask in step, for ever
            self._term, self._vote = term, None
        if term < self._term or self._vote not in (None, rank) or message.position < self._memberships[-1].position:
            return False
        self._vote, self._voted_at = rank, asyncio.get_running_loop().time()
        return True

    def _follow(self, leader: Leader) -> None:
        """Whoever leads has won its term; a later term is the better one."""
        if leader.term > max(self._lost, self._leader.term if self._leader else -1):
            self._leader, self._voted_at = leader, float("-inf")
            if leader.term > self._term:
                self._term, self._vote = leader.term, leader.rank
            self._led.set()

    def _agreed(self, position: Position) -> None:
        if any(known.position == position for known in self._memberships):
            self._memberships = [known for known in self._memberships if known.position >= position]

    # -- as a candidate and as the leader ----------------------------------------------------------------------

    def _turn(self) -> int:
        """How many stand in line before this supervisor; the one that was lost comes last."""
        line = sorted(rank for rank in self._memberships[-1].roster if rank != self._lost_rank)
        return line.index(self._rank) if self._rank in line else len(line)

    async def _campaign(self) -> None:
        self._term, self._vote = self._term + 1, self._rank
        term = self._term
        question = Campaign(term, self._rank, self._memberships[-1].position)
        asking = asyncio.create_task(self._ask_all(question))
        led = asyncio.create_task(self._led.wait())
        try:
            await asyncio.wait({asking, led}, timeout=ROUND, return_when=asyncio.FIRST_COMPLETED)
            if asking.done() and (failed := asking.exception()) and self._leader is None:
                raise failed
            if asking.done() and self._leader is None and self._term == term:
                self._follow(Leader(term, self._rank, *self._address))
                self._tell(Leads(Leader(term, self._rank, *self._address)))
        finally:
            asking.cancel()
            led.cancel()

    async def _ask_all(self, question: Message) -> None:
        """Until a majority of every membership that may count says yes; LostMajority when that cannot be."""
        newest, frame = self._memberships[-1], encode(question)
        yes, gone = {self._rank}, set[int]()
        know = {self._rank, newest.leader}  # who has acknowledged the newest membership
        may_know = know | self._members().keys()

        async def ask(rank: int, place: Place) -> None:
            while rank not in gone | yes:
                try:
                    answer = await self._line(place).ask(frame)
                except ConnectionRefusedError:
                    gone.add(rank)
                    may_know.difference_update({rank} - know)
                except OSError:
                    await asyncio.sleep(AGAIN)
                else:
                    if answer.leader is not None:
                        self._follow(answer.leader)
                    (know.add if answer.position == newest.position else may_know.discard)(rank)
                    if answer.yes:
                        yes.add(rank)
                    else:
                        await asyncio.sleep(AGAIN)

        asking = {asyncio.create_task(ask(*each)) for each in self._others()}
        try:
            while not all(majority(yes, roster) for roster in self._counting(know)):
                if lost := [
                    roster for roster in self._counting(may_know) if not majority(roster.keys() - gone, roster)
                ]:
                    left = lost[0].keys() - gone
                    raise LostMajority(f"of supervisors {_names(lost[0])} only {_names(left)} can answer: no majority")
                _, asking = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in asking:
                task.cancel()
        if len(self._counting(know)) == 1:
            self._agreed(newest.position)

    def _counting(self, know: Collection[int]) -> list[Roster]:
        """The memberships of which a majority is needed; the newest alone, if those who know it have agreed it."""
        rosters = [membership.roster for membership in self._memberships]
        return rosters[-1:] if all(majority(know, roster) for roster in rosters) else rosters

    def _tell(self, message: Message) -> None:
        """Everybody, once, without waiting: who misses it hears it when it asks."""

        frame = encode(message)

        async def tell(place: Place) -> None:
            with suppress(OSError):
                await self._line(place).ask(frame)

        for _, place in self._others():
            task = asyncio.create_task(tell(place))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    def _others(self) -> Sequence[tuple[int, Place]]:
        return [(rank, place) for rank, place in sorted(self._members().items()) if rank != self._rank]

    def _members(self) -> Roster:
        return {rank: place for known in self._memberships for rank, place in known.roster.items()}

    def _line(self, place: Place) -> _Line:
        return self._lines.setdefault(place, _Line(place, self._token))


class _Line:
    """To another supervisor's agreement: one question at a time, each with its answer."""

    def __init__(self, place: Place, token: str) -> None:
        self._place, self._token = place, token
        self._lock = asyncio.Lock()
        self._peer: Peer | None = None

    async def ask(self, question: bytes) -> Answer:
        """`question` is a frame. OSError where no answer comes; ConnectionRefusedError where nobody lives any more."""
        async with self._lock:
            try:
                if self._peer is None:
                    self._peer = await connect(*self._place, self._token, CandidateHello(), ANSWER)
                self._peer.send_frame(question)
                async with asyncio.timeout(ANSWER):
                    answer = await self._peer.recv(TO_CANDIDATE)
                    assert isinstance(answer, Answer)  # there is no other message to a candidate
                    return answer
            except BaseException:  # cancelled too: the answer to this question must not be taken for that to the next
                self.close()
                raise

    def close(self) -> None:
        if self._peer is not None:
            self._peer.abort()
            self._peer = None


def _names(ranks: Any) -> str:
    return ", ".join(map(str, sorted(ranks)))
