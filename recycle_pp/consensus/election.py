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
supervisor whose port refuses connections for a while has ended (`refusal.py`); if that leaves no majority nobody waits.
Processes of this machine that have ended are proven dead: see `majority`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from recycle_pp.wire.connection import Peer
from recycle_pp.wire.frames import encode
from recycle_pp.wire.messages.agreement import (
    TO_VOTER,
    Campaign,
    Leader,
    Leads,
    Membership,
    Place,
    Poll,
    Propose,
    Who,
)
from recycle_pp.wire.messages.table import Message

from .agreement import Deposed, LostMajority, majority
from .process_identity import is_dead
from .refusal import REFUSED
from .voter import Roster, Voter
from .voter_client import VoterClient

TURN = 0.2  # seconds that a candidate gives each living one before it
CAMPAIGN = 6.0  # seconds until a candidate without a majority gives way: a question and its answer, on slow machines
AGAIN, LONGEST = 0.02, 0.5  # seconds between two times of asking, at first and at last
UNCOUNTED = 8.0  # seconds that a supervisor without a vote waits for somebody to say who leads
SLOW = 15.0  # seconds that an election may take, beyond those until everybody has noticed the loss


class Election:
    """The embedded `Agreement`. patience: seconds by which others may notice a loss later, and that a membership may
    take to be acknowledged. refused: see `VoterClient`. In the event loop's thread only."""

    def __init__(
        self,
        rank: int,
        address: Place,
        token: str,
        leader: Leader | None = None,
        patience: float = 10.0,
        refused: float = REFUSED,
    ) -> None:
        self._rank, self._address, self._token, self._patience = rank, address, token, patience
        self._refused = refused
        self.voter = Voter(rank, address, leader)
        self._clients: dict[Place, VoterClient] = {}
        self._telling: set[asyncio.Task[None]] = set()

    async def leader(self, after: int) -> Leader:
        self.voter.lose(after, self._rank)
        if self.voter.leader is None:
            standing = asyncio.create_task(self._stand())
            led = asyncio.create_task(self.voter.led.wait())
            try:
                await asyncio.wait({standing, led}, timeout=self._patience + SLOW, return_when=asyncio.FIRST_COMPLETED)
                if self.voter.leader is None and standing.done() and (failed := standing.exception()):
                    raise failed
            finally:
                led.cancel()
                if not standing.cancel() and not standing.cancelled():
                    standing.exception()  # of no interest where there is a leader
        if self.voter.leader is None:
            raise LostMajority(f"no majority of supervisors {_names(self.voter.newest.roster)} has answered in time")
        return self.voter.leader

    async def agree(self, generation: int, supervisors: Mapping[int, Place]) -> None:
        supervisors = {**supervisors, self._rank: self._address}  # whoever asks for it is one of them
        try:
            async with asyncio.timeout(self._patience + SLOW):
                agreed = False
                while not agreed:
                    leader = self.voter.leader or await self.leader(after=self.voter.lost)
                    if leader.rank != self._rank:
                        raise Deposed("another supervisor coordinates now")
                    agreed = await self._propose(leader, generation, supervisors)
                    if not agreed and self.voter.leader == leader:  # some know a later term, in which nobody leads
                        await self.leader(after=leader.term)
        except TimeoutError:
            raise LostMajority(f"no majority of supervisors {_names(supervisors)} has answered in time") from None

    async def supervisors(self) -> Mapping[int, Place]:
        return self.voter.newest.roster

    async def superseded(self, leader: Leader) -> Leader:
        while self.voter.leader is None or self.voter.leader.term <= leader.term:
            await self.voter.news.wait()
        return self.voter.leader

    async def handle(self, peer: Peer) -> None:
        async for message in peer.listen(TO_VOTER):
            peer.send(self.voter.answer(message))

    def close(self) -> None:
        for task in self._telling:
            task.cancel()
        for client in self._clients.values():
            client.close()

    # -- as a candidate ----------------------------------------------------------------------------------------

    async def _stand(self) -> None:
        """Stands as a candidate until it leads, or is cancelled; LostMajority where too few can answer."""
        if self._rank not in self.voter.members():
            with suppress(TimeoutError):
                async with asyncio.timeout(min(self._patience, UNCOUNTED)):
                    await self._ask_who_leads()
            known = _names(self.voter.newest.roster)
            raise LostMajority(f"no majority of supervisors {known} has answered in time; this one has no vote")
        gone: set[int] = set()
        await self._wait_for_turn(gone)
        while self.voter.leader is None:
            await self._ask_all(lambda: Poll(self._rank, self.voter.newest.position, sorted(gone)), gone, again=True)
            await self._campaign(gone)
            if self.voter.leader is None:
                await asyncio.sleep(random.uniform(0, 2 * TURN))  # two may have campaigned in step

    async def _ask_who_leads(self) -> None:
        """Asks all members who leads until one says so. For a supervisor that is no member, and so may not be a
        candidate."""
        while True:
            for rank, place in self._others():
                with suppress(OSError):
                    self.voter.hear(rank, await self._client(place).ask(encode(Who())))
            await asyncio.sleep(LONGEST)

    async def _wait_for_turn(self, gone: set[int]) -> None:
        """Blocks for `TURN` seconds a living member of lower rank, which comes first; the one that was lost comes
        last."""
        roster = self.voter.newest.roster
        order = [rank for rank in sorted(roster) if rank != self.voter.lost_rank]
        for rank in order[: order.index(self._rank)] if self._rank in order else order:
            with suppress(TimeoutError):
                async with asyncio.timeout(TURN):
                    await self._until_gone(rank, roster[rank])
                    gone.add(rank)

    async def _until_gone(self, rank: int, place: Place) -> None:
        """Blocks until that supervisor's process has ended; for ever while it lives."""
        while not is_dead(place.process):
            try:
                self.voter.hear(rank, await self._client(place).ask(encode(Who())))
                await asyncio.sleep(TURN)
            except ConnectionRefusedError:
                return
            except OSError:
                pass
            await asyncio.sleep(AGAIN)

    async def _campaign(self, gone: set[int]) -> None:
        if self.voter.leader is not None:
            return
        self.voter.learn(self.voter.term + 1)
        term, self.voter.vote = self.voter.term, self._rank
        campaign = Campaign(term, self._rank, self.voter.newest.position)
        with suppress(TimeoutError):
            async with asyncio.timeout(CAMPAIGN):
                won = await self._ask_all(lambda: campaign, gone)
                if won and self.voter.leader is None and self.voter.term == term:
                    leader = Leader(term, self._rank, self._address.host, self._address.port)
                    self.voter.follow(leader)
                    self._tell(Leads(leader))

    async def _propose(self, leader: Leader, generation: int, roster: Roster) -> bool:
        """True when a majority has acknowledged the membership; False where too many refuse or another one leads
        meanwhile."""
        position = (leader.term, generation)
        self.voter.memberships.append(Membership(position, self._rank, roster))
        question = Propose(leader, self.voter.memberships)
        if not await self._ask_all(lambda: question, set()) or self.voter.leader != leader:
            return False
        self.voter.agreed(position)
        self._tell(Propose(leader, self.voter.memberships))  # those, too, that had not answered yet
        return True

    async def _ask_all(self, question: Callable[[], Message], gone: set[int], again: bool = False) -> bool:
        """True when a majority of every membership that may count says yes; False when too many have said no, if they
        are not asked again. LostMajority when too few are left. gone: those who are known to have died, and more soon.
        """
        newest, frame = self.voter.newest, encode(question())
        yes, no = {self._rank}, set[int]()
        dead = {rank for rank, place in self._others() if is_dead(place.process)}
        gone |= dead
        know = {self._rank, newest.leader}  # who has acknowledged the newest membership
        may_know = know | self.voter.members().keys()

        async def ask(rank: int, place: Place) -> None:
            pause = AGAIN
            while rank not in yes:
                if is_dead(place.process):
                    dead.add(rank)
                    break
                try:
                    answer = await self._client(place).ask(encode(question()) if again else frame)
                except ConnectionRefusedError:
                    if is_dead(place.process):
                        dead.add(rank)
                    break
                except OSError:
                    pass
                else:
                    self.voter.hear(rank, answer)
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
            while not all(majority(yes, roster, dead) for roster in self.voter.counting(know)):
                for roster in self.voter.counting(may_know):
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
        # Whoever is no member of it stays one of those before: else, elected, it could not be elected again.
        if len(self.voter.counting(know)) == 1 and self._rank in newest.roster:
            self.voter.agreed(newest.position)
        return True

    def _tell(self, message: Message) -> None:
        """Sends it to all members in the background, again until each has answered. What is under way of an earlier
        call is cancelled."""
        frame = encode(message)

        async def tell(place: Place) -> None:
            pause = AGAIN
            while not is_dead(place.process):
                try:
                    await self._client(place).ask(frame)
                    return
                except ConnectionRefusedError:
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
        return [(rank, place) for rank, place in sorted(self.voter.members().items()) if rank != self._rank]

    def _client(self, place: Place) -> VoterClient:
        return self._clients.setdefault(place, VoterClient(place, self._token, self._refused))


def _names(ranks: Any) -> str:
    return ", ".join(map(str, sorted(ranks)))
