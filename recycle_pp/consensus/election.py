"""The embedded agreement: the supervisors vote for who coordinates, and acknowledge every membership.

    election = Election(rank=2, address=Place("127.0.0.1", 4711), token=token, leader=Leader(0, 0, "127.0.0.1", 4700))
    leader = await election.leader(after=0)
    await election.agree(generation=5, supervisors={1: place, 2: place})

As in Raft (Ongaro and Ousterhout, 2014), a voter has one vote a term, and none for a candidate whose membership is
older than its own. The log is a single entry, the membership. A new one needs a majority of the last agreed one, of
every one that was proposed since, and of itself (Raft's joint consensus), so any two majorities that could decide
something share a supervisor. A candidate needs the same, with two exceptions:

- Enough answers show that its newest membership was agreed: then older ones count no longer.
- Enough answers show that its newest membership was not agreed, and the votes promise that it never will be: then that
  membership does not count. So no other supervisor depends on the vote of a leader that could not finish a proposal.

A leader that hears no answers must not propose anything, as others may still receive it (a link cut in one direction).
So a proposal follows a question to the same supervisors that a majority of them has answered, and it goes to its own
members only: a supervisor that is reachable never acknowledges a membership without itself.

No candidate raises a term before a majority has answered that it would vote for it (Raft's pre-vote): a voter that
hears the leader would not, nor one that has just voted for another candidate that may live. A leader that is refused
because of a later term in which no supervisor leads takes that term's successor, and continues. So any message may be
seconds late; that costs the
seconds. The next in rank is the first candidate, the others give those before them a while each, if they live. A
supervisor whose port refuses connections for a while has ended (`refusal.py`); if that leaves no majority no supervisor
waits. Processes of this machine that have ended are proven dead: see `majority`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Mapping, Sequence
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
    Position,
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
    take to be acknowledged. refused: see `VoterClient`. first_term: see `make_agreement`. In the event loop's thread
    only."""

    def __init__(
        self,
        rank: int,
        address: Place,
        token: str,
        leader: Leader | None = None,
        patience: float = 10.0,
        refused: float = REFUSED,
        first_term: int = 0,
    ) -> None:
        self._rank, self._address, self._token, self._patience = rank, address, token, patience
        self._refused = refused
        self.voter = Voter(rank, address, leader, first_term)
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

    async def agree(self, generation: int, supervisors: Mapping[int, Place]) -> int:
        supervisors = {**supervisors, self._rank: self._address}  # the leader is one of them
        try:
            async with asyncio.timeout(self._patience + SLOW):
                while True:
                    leader = await self._confirmed(supervisors)
                    if leader is None:
                        continue
                    if await self._propose(leader, generation, supervisors):
                        return leader.term
                    await asyncio.sleep(AGAIN)
        except TimeoutError:
            raise LostMajority(f"no majority of supervisors {_names(supervisors)} has answered in time") from None

    async def confirm(self, held: bool) -> int:
        while (leader := await self._confirmed(self.voter.members())) is None:
            pass
        return leader.term

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
            await self._ask_all(
                lambda: Poll(self._rank, self.voter.newest.position, sorted(gone)), gone, again=True, candidate=True
            )
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
                counting = await self._ask_all(lambda: campaign, gone, candidate=True)
                if counting and self.voter.leader is None and self.voter.term == term:
                    self.voter.drop_proposals_after(counting[-1].position)
                    leader = Leader(term, self._rank, self._address.host, self._address.port)
                    self.voter.follow(leader)
                    self._tell(Leads(leader))

    async def _confirmed(self, among: Collection[int]) -> Leader | None:
        """This leader, once a majority that consists of members of `among` has answered that it follows it. None: ask
        again, because most know a later term, in which this supervisor leads now, or `among` is no majority at
        present (supervisors whose connections broke may come back)."""
        leader = self.voter.leader or await self.leader(after=self.voter.lost)
        if leader.rank != self._rank:
            raise Deposed("another supervisor coordinates now")
        confirmed = await self._ask_all(lambda: Leads(leader), set(), among=among)
        if self.voter.leader != leader:
            return None
        if confirmed:
            return leader
        if self.voter.term > leader.term:
            await self.leader(after=leader.term)
        else:
            await asyncio.sleep(TURN)
        return None

    async def _propose(self, leader: Leader, generation: int, roster: Roster) -> bool:
        """True when a majority has acknowledged the membership; False where too many refuse or another one leads
        meanwhile."""
        position = (leader.term, generation)
        if self.voter.newest.position != position:  # else an earlier attempt has proposed it
            self.voter.memberships.append(Membership(position, self._rank, roster))
        question = Propose(leader, self.voter.memberships)
        others = [(rank, place) for rank, place in self._others() if rank in roster]
        if not await self._ask_all(lambda: question, set(), others=others) or self.voter.leader != leader:
            return False
        self.voter.agreed(position)
        self._tell(Propose(leader, self.voter.memberships))  # those, too, that had not answered yet
        return True

    async def _ask_all(
        self,
        question: Callable[[], Message],
        gone: set[int],
        again: bool = False,
        candidate: bool = False,
        among: Collection[int] | None = None,
        others: Sequence[tuple[int, Place]] | None = None,
    ) -> list[Membership]:
        """The memberships that count, a majority of each of which says yes; none when too many have said no, if they
        are not asked again. LostMajority when too few are left.

        gone       ranks that are known to have died; more are added
        candidate  a proposal that those who say yes lack, so that it cannot be agreed any more, does not count
        among      only their answers count
        others     whom to ask; by default all other members
        """
        newest, frame = self.voter.newest, encode(question())
        everyone = self._others()
        others = everyone if others is None else others
        yes, no = {self._rank}, set[int]()
        dead = {rank for rank, place in everyone if is_dead(place.process)}
        gone |= dead
        know = {self._rank, newest.leader}  # who has acknowledged the newest membership
        may_know = know | self.voter.members().keys()
        lack: dict[int, Position] = {}  # the newest membership of those that have said yes, and do not know the newest

        def complete() -> list[Membership]:
            counting = self.voter.counting(know, lack if candidate else {}, dead)
            counted = yes if among is None else yes & set(among)
            return counting if all(majority(counted, of.roster, dead) for of in counting) else []

        def hopeless(left: Collection[int]) -> Roster | None:
            """A roster without a majority of those left, whatever the others still answer."""
            most = {rank: (-1, -1) for rank in left if rank not in know} | lack
            ways = [self.voter.counting(may_know), *([self.voter.counting(know, most, dead)] if candidate else [])]
            missed = [next((of.roster for of in way if not majority(left, of.roster, dead)), None) for way in ways]
            return missed[0] if None not in missed else None

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
                    if answer.yes and answer.position < newest.position:
                        lack[rank] = answer.position
                    if not again:
                        return
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST)
            if rank not in yes:
                gone.add(rank)
                may_know.difference_update({rank} - know)

        asking = {asyncio.create_task(ask(*each)) for each in others}
        try:
            while not (counting := complete()):
                left = self.voter.members().keys() - gone
                if roster := hopeless(left):
                    names = _names(left & roster.keys())
                    raise LostMajority(f"of supervisors {_names(roster)} only {names} can answer: no majority")
                if not asking or (not again and hopeless(left - no)):
                    return []
                _, asking = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in asking:
                task.cancel()
        # A supervisor that is not a member keeps one of those before: else, elected, it could not be elected again.
        if len(self.voter.counting(know)) == 1 and self._rank in newest.roster:
            self.voter.agreed(newest.position)
        return counting

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
