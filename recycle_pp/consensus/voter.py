"""What one supervisor knows of the agreement, and how it answers the others: the voter's half of `election`.

    voter = Voter(rank=2, address=place, leader=Leader(0, 0, "127.0.0.1", 4700))
    answer = voter.answer(message)        # Who, Poll, Campaign, Propose or Leads, of a candidate or a leader
    voter.hear(1, answer)                 # what another voter has answered: later terms, somebody who leads
    voter.leader, voter.newest            # who leads, as far as it knows; the newest membership

No message waits for anything here, and nothing is sent: the same order of messages gives the same answers, but for the
clock by which a vote loses its force (`VOTED`). In the event loop's thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Any

from recycle_pp.wire.messages.agreement import (
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
from recycle_pp.wire.messages.table import Message

from .agreement import majority

VOTED = 5.0  # seconds that whoever was voted for may take to say that it leads

Roster = dict[int, Place]


class Voter:
    """leader: the job's first one; None: this supervisor is, in `first_term`.

    term     the newest one that anybody is known to have voted in or led
    vote     given in that term
    memberships  the last agreed one, and those proposed since
    """

    def __init__(self, rank: int, address: Place, leader: Leader | None, first_term: int = 0) -> None:
        self.leader: Leader | None = None
        self.lost, self.lost_rank = -1, -1  # term and rank of the leader that was lost
        self.term = first_term - 1
        self.vote: int | None = None
        self.led = asyncio.Event()  # somebody leads
        self.news = asyncio.Event()  # set, and replaced, whenever somebody begins to
        self._voted_at = float("-inf")
        # What the job is before any membership is agreed: its first leader alone.
        first = {leader.rank: Place(leader.host, leader.port)} if leader else {rank: address}
        self.memberships = [Membership((-1, -1), leader.rank if leader else rank, first)]
        self._handlers: dict[type[Message], Callable[[Any], bool]] = {
            Who: lambda message: True,
            Poll: self._would_vote,
            Campaign: self._votes,
            Propose: self._acknowledges,
            Leads: self._hears_leader,
        }
        if leader is not None:
            self.follow(leader)

    @property
    def newest(self) -> Membership:
        return self.memberships[-1]

    def members(self) -> Roster:
        """Where everybody listens who is in one of the memberships that may count, by rank."""
        return {rank: place for known in self.memberships for rank, place in known.roster.items()}

    def counting(
        self, know: Collection[int], lack: Mapping[int, Position] | None = None, dead: Collection[int] = ()
    ) -> list[Membership]:
        """The memberships of which a majority is needed, oldest first.

        know: ranks that have acknowledged the newest one; if they have agreed it, it counts alone. lack: by rank, the
        newest membership of voters that acknowledge no later one of an older term; a proposal that cannot be agreed
        without them does not count.
        """
        counting = list(self.memberships)
        if all(majority(know, of.roster) for of in counting):
            return counting[-1:]
        while len(counting) > 1:
            lacking = {rank for rank, position in (lack or {}).items() if position < counting[-1].position}
            if all(majority(of.roster.keys() - lacking, of.roster, dead) for of in counting):
                break
            counting.pop()
        return counting

    # -- answers -----------------------------------------------------------------------------------------------

    def answer(self, message: Message) -> Answer:
        yes = self._handlers[type(message)](message)
        return Answer(yes, self.newest.position, self.term, self.leader)

    def _acknowledges(self, message: Propose) -> bool:
        if message.leader.term < self.term or not message.memberships:
            return False
        self.follow(message.leader)
        if message.memberships[-1].position < self.newest.position:  # it was long on its way
            return False
        self.memberships = message.memberships
        return True

    def _hears_leader(self, message: Leads) -> bool:
        """Whether this voter follows the leader, and would acknowledge its next proposal."""
        self.follow(message.leader)
        return self.leader == message.leader and message.leader.term >= self.term

    def _would_vote(self, poll: Poll) -> bool:
        """Whether it would vote for this candidate now. Changes nothing (Raft's pre-vote)."""
        if poll.position < self.newest.position or (self.leader is not None and self.leader.rank != poll.rank):
            return False
        voted = asyncio.get_running_loop().time() - self._voted_at < VOTED
        return not voted or self.vote == poll.rank or self.vote in poll.gone

    def _votes(self, of: Campaign) -> bool:
        if self.leader is not None and self.leader.rank != of.rank:
            return False
        self.learn(of.term)
        if of.term < self.term or self.vote not in (None, of.rank) or of.position < self.newest.position:
            return False
        self.vote, self._voted_at = of.rank, asyncio.get_running_loop().time()
        return True

    # -- what it learns ----------------------------------------------------------------------------------------

    def learn(self, term: int) -> None:
        """Somebody votes in this term, or leads it; in a later one than the newest known it has not voted yet."""
        if term > self.term:
            self.term, self.vote = term, None

    def follow(self, leader: Leader) -> None:
        """Somebody says that this one leads, which has won its term: it is followed if the term is a later one."""
        if leader.term > max(self.lost, self.leader.term if self.leader else -1):
            self.leader, self._voted_at = leader, float("-inf")
            if leader.term > self.term:
                self.term, self.vote = leader.term, leader.rank
            self.led.set()
            self.news.set()
            self.news = asyncio.Event()

    def lose(self, term: int, rank: int) -> None:
        """The leader of this term, or of an earlier one, is lost. rank: this supervisor's own."""
        self.lost = max(self.lost, term)
        self.learn(term)
        if self.leader is not None and self.leader.term <= term:
            if self.leader.rank != rank:
                self.lost_rank = self.leader.rank
            self.leader = None
            self.led.clear()

    def hear(self, rank: int, answer: Answer) -> None:
        """Learns from an answer: its term, and who leads."""
        self.learn(answer.term)
        if (leader := answer.leader) is not None:
            if leader.rank == rank and leader.term == self.lost and self.leader is None:
                self.lost -= 1  # it was only the connection that was lost
            self.follow(leader)

    def drop_proposals_after(self, position: Position) -> None:
        """Later ones than the membership of this position cannot be agreed any more."""
        self.memberships = [known for known in self.memberships if known.position <= position]

    def agreed(self, position: Position) -> None:
        """A majority has acknowledged the membership of this position: older ones count no more."""
        if any(known.position == position for known in self.memberships):
            self.memberships = [known for known in self.memberships if known.position >= position]
