"""The embedded agreement: the supervisors vote for who coordinates, and acknowledge every membership.

    election = Election(rank=2, address=Place("127.0.0.1", 4711), token=token, leader=Leader(0, 0, "127.0.0.1", 4700))
    leader = await election.leader(after=0)
    await election.agree(generation=5, supervisors={1: place, 2: place})

As in Raft (Ongaro and Ousterhout, 2014): one vote a term, and none for a candidate whose membership is older than the
voter's own. The log is a single entry, the membership. A new one needs a majority of the last agreed one, of every one
that was proposed since, and of itself (Raft's joint consensus), so any two majorities that could decide something share
a supervisor. A candidate needs the same, unless it hears from enough of them that its newest membership was agreed,
which the leader may have had no time to say.

Nobody raises a term before a majority has said that it would vote for it (Raft's pre-vote): whoever hears the leader
would not, nor whoever has just voted for another one that may live. A leader that is refused because of a later term in
which nobody leads takes that term's successor, and goes on. So any message may be seconds late; that costs the
seconds. The next in rank is the first candidate, the others give those before them a while each, if they live. A
supervisor whose port refuses connections has died, if it is not a process of this very machine that still runs; where
that leaves no majority nobody waits. Processes of this machine that have ended are proven dead: see `majority`.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from recycle_pp.wire.connection import Peer, connect
from recycle_pp.wire.frames import encode
from recycle_pp.wire.messages.agreement import (
    TO_CANDIDATE,
    TO_VOTER,
    Answer,
    Campaign,
    Leader,
    Leads,
    Membership,
    Place,
    Poll,
    Position,
    Propose,
    Who,
)
from recycle_pp.wire.messages.handshake import CandidateHello
from recycle_pp.wire.messages.table import Message

from .agreement import Deposed, LostMajority, majority
from .process_identity import is_dead, is_here

TURN = 0.2  # seconds that a candidate gives each living one before it
CAMPAIGN = 6.0  # seconds until a candidate without a majority gives way: a question and its answer, on slow machines
VOTED = 5.0  # seconds that whoever was voted for may take to say that it leads
ANSWER = 6.0  # seconds for an answer from a supervisor that may be cut off
CONNECT = 10.0  # seconds for a connection to it
AGAIN, LONGEST = 0.02, 0.5  # seconds between two times of asking, at first and at last
UNCOUNTED = 8.0  # seconds that a supervisor without a vote waits for somebody to say who leads
SLOW = 15.0  # seconds that an election may take, beyond those until everybody has noticed the loss

Roster = dict[int, Place]


class Election:
    """patience: seconds that others may take longer to notice a loss, and to acknowledge a membership."""

    def __init__(
        self, rank: int, address: Place, token: str, leader: Leader | None = None, patience: float = 10.0
    ) -> None:
        self._rank, self._address, self._token, self._patience = rank, address, token, patience
        self._leader: Leader | None = None
        self._lost, self._lost_rank = -1, -1  # term and rank of the leader that was lost
        self._term = -1  # newest term that anybody is known to have voted in or led
        self._vote: int | None = None  # given in that term
        self._voted_at = float("-inf")
        self._led = asyncio.Event()  # somebody leads
        self._news = asyncio.Event()  # set, and replaced, whenever somebody begins to
        # What the job is before any membership is agreed: its first leader alone.
        first = {leader.rank: Place(leader.host, leader.port)} if leader else {rank: address}
        begin = Membership((-1, -1), leader.rank if leader else rank, first)
        self._memberships = [begin]  # the last agreed, and those proposed since
        self._lines: dict[Place, _Line] = {}
        self._telling: set[asyncio.Task[None]] = set()
        self._handlers: dict[type[Message], Callable[[Any], bool]] = {
            Who: lambda message: True,
            Poll: self._would_vote,
            Campaign: self._votes,
            Propose: self._acknowledges,
            Leads: self._hears_leader,
        }
        if leader is not None:
            self._follow(leader)

    async def leader(self, after: int) -> Leader:
        self._lost = max(self._lost, after)
        self._learn(after)
        if self._leader is not None and self._leader.term <= after:
            if self._leader.rank != self._rank:
                self._lost_rank = self._leader.rank
            self._leader = None
            self._led.clear()
        if self._leader is None:
            standing = asyncio.create_task(self._stand())
            led = asyncio.create_task(self._led.wait())
            try:
                await asyncio.wait({standing, led}, timeout=self._patience + SLOW, return_when=asyncio.FIRST_COMPLETED)
                if self._leader is None and standing.done() and (failed := standing.exception()):
                    raise failed
            finally:
                led.cancel()
                if not standing.cancel() and not standing.cancelled():
                    standing.exception()  # of no interest where there is a leader
        if self._leader is None:
            raise LostMajority(f"no majority of supervisors {_names(self._newest.roster)} has answered in time")
        return self._leader

    async def agree(self, generation: int, supervisors: Mapping[int, Place]) -> None:
        supervisors = {**supervisors, self._rank: self._address}  # whoever asks for it is one of them
        try:
            async with asyncio.timeout(self._patience + SLOW):
                agreed = False
                while not agreed:
                    leader = self._leader or await self.leader(after=self._lost)
                    if leader.rank != self._rank:
                        raise Deposed("another supervisor coordinates now")
                    agreed = await self._propose(leader, generation, supervisors)
                    if not agreed and self._leader == leader:  # some know a later term, in which nobody leads
                        await self.leader(after=leader.term)
        except TimeoutError:
            raise LostMajority(f"no majority of supervisors {_names(supervisors)} has answered in time") from None

    async def supervisors(self) -> Mapping[int, Place]:
        return self._newest.roster

    async def superseded(self, leader: Leader) -> Leader:
        while self._leader is None or self._leader.term <= leader.term:
            await self._news.wait()
        return self._leader

    async def handle(self, peer: Peer) -> None:
        async for message in peer.listen(TO_VOTER):
            yes = self._handlers[type(message)](message)
            peer.send(Answer(yes, self._newest.position, self._term, self._leader))

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
        if message.memberships[-1].position < self._newest.position:  # it was long on its way
            return False
        self._memberships = message.memberships
        return True

    def _hears_leader(self, message: Leads) -> bool:
        self._follow(message.leader)
        return True

    def _would_vote(self, poll: Poll) -> bool:
        """It promises nothing."""
        if poll.position < self._newest.position or (self._leader is not None and self._leader.rank != poll.rank):
            return False
        voted = asyncio.get_running_loop().time() - self._voted_at < VOTED
        return not voted or self._vote == poll.rank or self._vote in poll.gone

    def _votes(self, of: Campaign) -> bool:
        if self._leader is not None and self._leader.rank != of.rank:
            return False
        self._learn(of.term)
        if of.term < self._term or self._vote not in (None, of.rank) or of.position < self._newest.position:
            return False
        self._vote, self._voted_at = of.rank, asyncio.get_running_loop().time()
        return True

    def _learn(self, term: int) -> None:
        if term > self._term:
            self._term, self._vote = term, None

    def _follow(self, leader: Leader) -> None:
        """Whoever leads has won its term; a later term is the better one."""
        if leader.term > max(self._lost, self._leader.term if self._leader else -1):
            self._leader, self._voted_at = leader, float("-inf")
            if leader.term > self._term:
                self._term, self._vote = leader.term, leader.rank
            self._led.set()
            self._news.set()
            self._news = asyncio.Event()

    def _agreed(self, position: Position) -> None:
        if any(known.position == position for known in self._memberships):
            self._memberships = [known for known in self._memberships if known.position >= position]

    # -- as a candidate and as the leader ----------------------------------------------------------------------

    @property
    def _newest(self) -> Membership:
        return self._memberships[-1]

    async def _stand(self) -> None:
        """Until it leads; LostMajority where it cannot."""
        if self._rank not in self._members():
            with suppress(TimeoutError):
                async with asyncio.timeout(min(self._patience, UNCOUNTED)):
                    await self._ask_who_leads()
            known = _names(self._newest.roster)
            raise LostMajority(f"no majority of supervisors {known} has answered in time; this one has no vote")
        gone: set[int] = set()
        await self._wait_for_turn(gone)
        while self._leader is None:
            await self._ask_all(lambda: Poll(self._rank, self._newest.position, sorted(gone)), gone, again=True)
            await self._campaign(gone)
            if self._leader is None:
                await asyncio.sleep(random.uniform(0, 2 * TURN))  # two may have campaigned in step

    async def _ask_who_leads(self) -> None:
        """Until somebody says so: it does not belong to the membership, not yet or not any more, and has no vote."""
        while True:
            for rank, place in self._others():
                with suppress(OSError):
                    self._hear(rank, await self._line(place).ask(encode(Who())))
            await asyncio.sleep(LONGEST)

    async def _wait_for_turn(self, gone: set[int]) -> None:
        """Those before it in line come first; the one that was lost comes last."""
        roster = self._newest.roster
        line = [rank for rank in sorted(roster) if rank != self._lost_rank]
        for rank in line[: line.index(self._rank)] if self._rank in line else line:
            with suppress(TimeoutError):
                async with asyncio.timeout(TURN):
                    await self._until_gone(rank, roster[rank])
                    gone.add(rank)

    async def _until_gone(self, rank: int, place: Place) -> None:
        """Which it may never be."""
        while not is_dead(place.process):
            try:
                self._hear(rank, await self._line(place).ask(encode(Who())))
                await asyncio.sleep(TURN)
            except ConnectionRefusedError:
                if not is_here(place.process):
                    return
            except OSError:
                pass
            await asyncio.sleep(AGAIN)

    async def _campaign(self, gone: set[int]) -> None:
        if self._leader is not None:
            return
        self._learn(self._term + 1)
        term, self._vote = self._term, self._rank
        campaign = Campaign(term, self._rank, self._newest.position)
        with suppress(TimeoutError):
            async with asyncio.timeout(CAMPAIGN):
                won = await self._ask_all(lambda: campaign, gone)
                if won and self._leader is None and self._term == term:
                    leader = Leader(term, self._rank, self._address.host, self._address.port)
                    self._follow(leader)
                    self._tell(Leads(leader))

    async def _propose(self, leader: Leader, generation: int, roster: Roster) -> bool:
        """False where too many refuse, or another one leads meanwhile."""
        position = (leader.term, generation)
        self._memberships.append(Membership(position, self._rank, roster))
        question = Propose(leader, self._memberships)
        if not await self._ask_all(lambda: question, set()) or self._leader != leader:
            return False
        self._agreed(position)
        self._tell(Propose(leader, self._memberships))  # those, too, that had not answered yet
        return True

    async def _ask_all(self, question: Callable[[], Message], gone: set[int], again: bool = False) -> bool:
        """True when a majority of every membership that may count says yes; False when too many have said no, if they
        are not asked again. LostMajority when too few are left. gone: those who are known to have died, and more soon.
        """
        newest, frame = self._newest, encode(question())
        yes, no = {self._rank}, set[int]()
        dead = {rank for rank, place in self._others() if is_dead(place.process)}
        gone |= dead
        know = {self._rank, newest.leader}  # who has acknowledged the newest membership
        may_know = know | self._members().keys()

        async def ask(rank: int, place: Place) -> None:
            pause = AGAIN
            while rank not in yes:
                if is_dead(place.process):
                    dead.add(rank)
                    break
                try:
                    answer = await self._line(place).ask(encode(question()) if again else frame)
                except ConnectionRefusedError:
                    if not is_here(place.process):  # else the process ends just now, or will open its port again
                        break
                except OSError:
                    pass
                else:
                    self._hear(rank, answer)
                    (know.add if answer.position == newest.position else may_know.discard)(rank)
                    (yes if answer.yes else no).add(rank)
                    if not again:
                        return
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST)
            if rank not in yes:
                gone.add(rank)
                may_know.difference_update({rank} - know)

        asking = {asyncio.create_task(ask(*each)) for each in self._others()}
        try:
            while not all(majority(yes, roster, dead) for roster in self._counting(know)):
                for roster in self._counting(may_know):
                    if not majority(left := roster.keys() - gone, roster, dead):
                        raise LostMajority(
                            f"of supervisors {_names(roster)} only {_names(left)} can answer: no majority"
                        )
                    if not again and not majority(left - no, roster, dead):
                        return False
                if not asking:
                    return False
                _, asking = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in asking:
                task.cancel()
        if len(self._counting(know)) == 1:
            self._agreed(newest.position)
        return True

    def _hear(self, rank: int, answer: Answer) -> None:
        """What an answer says beside yes or no."""
        self._learn(answer.term)
        if (leader := answer.leader) is not None:
            if leader.rank == rank and leader.term == self._lost and self._leader is None:
                self._lost -= 1  # it was only the connection that was lost
            self._follow(leader)

    def _counting(self, know: Collection[int]) -> list[Roster]:
        """The memberships of which a majority is needed; the newest alone, if those who know it have agreed it."""
        rosters = [membership.roster for membership in self._memberships]
        return rosters[-1:] if all(majority(know, roster) for roster in rosters) else rosters

    def _tell(self, message: Message) -> None:
        """Everybody, without waiting for it, in the place of what they had not heard yet of the last time."""
        frame = encode(message)

        async def tell(place: Place) -> None:
            pause = AGAIN
            while not is_dead(place.process):
                try:
                    await self._line(place).ask(frame)
                    return
                except ConnectionRefusedError:
                    if not is_here(place.process):
                        return
                except OSError:
                    pass
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST)

        for task in self._telling:
            task.cancel()
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
    """To another supervisor's agreement: it answers one question after the other."""

    def __init__(self, place: Place, token: str) -> None:
        self._place, self._token = place, token
        self._connecting: asyncio.Task[_Connection] | None = None

    async def ask(self, question: bytes) -> Answer:
        """`question` is a frame. OSError where no answer comes; ConnectionRefusedError where nobody lives any more."""
        if self._connecting is None or (self._connecting.done() and self._is_lost(self._connecting)):
            self._connecting = asyncio.create_task(self._connect())
        connection = await asyncio.shield(self._connecting)  # others wait for it too
        return await connection.ask(question)

    async def _connect(self) -> _Connection:
        peer = await connect(self._place.host, self._place.port, self._token, CandidateHello(), CONNECT)
        return _Connection(peer)

    def _is_lost(self, connecting: asyncio.Task[_Connection]) -> bool:
        return connecting.exception() is not None or connecting.result().reading.done()

    def close(self) -> None:
        if self._connecting is not None and not self._connecting.cancel() and not self._is_lost(self._connecting):
            self._connecting.result().reading.cancel()


class _Connection:
    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._asked: deque[asyncio.Future[Answer]] = deque()
        self.reading = asyncio.create_task(self._read())

    async def ask(self, question: bytes) -> Answer:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        self._peer.send_frame(question)
        try:
            async with asyncio.timeout(ANSWER):
                return await answer
        except TimeoutError:
            self.reading.cancel()
            raise

    async def _read(self) -> None:
        """The answers, in the order of the questions, until the connection is lost."""
        try:
            async for message in self._peer.listen(TO_CANDIDATE):
                assert isinstance(message, Answer)  # there is no other message to a candidate
                answer = self._asked.popleft()
                if not answer.done():  # else nobody waits for it any more
                    answer.set_result(message)
        finally:
            self._peer.abort()
            for answer in self._asked:
                if not answer.done():
                    answer.set_exception(ConnectionResetError("the connection was closed"))


def _names(ranks: Any) -> str:
    return ", ".join(map(str, sorted(ranks)))
