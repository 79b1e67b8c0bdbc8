"""The voter's half of `election`: one supervisor's view of the agreement, and its answers to candidates.

    voter = Voter(rank=2, address=place, leader=Leader(0, 0, "127.0.0.1", 4700))
    answer = voter.answer(message)        # to Who, Poll, Campaign, Propose or Leads from a candidate or leader
    voter.learn_from(1, answer)           # adopts a newer term or leader from the answer of rank 1's voter
    voter.leader, voter.newest            # the current leader and the newest membership, as this voter knows them

A voter never waits and never sends. The same sequence of messages gives the same answers, except that a vote expires
after `VOTE_SECONDS`. Use a voter in the event loop's thread only.
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

VOTE_SECONDS = 5.0  # seconds after which a vote for a candidate that has not become the leader expires

Roster = dict[int, Place]


class Voter:
    """The state of one voter.

    leader       the current leader; None while it is unknown. The first supervisor of a job starts with None, and then
                 becomes the leader in term `first_term`
    term         newest term with a known vote or leader
    vote         rank of the candidate that got this voter's vote in `term`; None: no vote yet
    memberships  the last agreed membership, and all memberships proposed since
    """

    def __init__(self, rank: int, address: Place, leader: Leader | None, first_term: int = 0) -> None:
        self.leader: Leader | None = None
        self.lost, self.lost_rank = -1, -1  # term and rank of the lost leader
        self.term = first_term - 1
        self.vote: int | None = None
        self.has_leader = asyncio.Event()  # set while a leader is known
        self.leader_changed = asyncio.Event()  # set and replaced at each new leader
        self._voted_at = float("-inf")
        # Until a membership is agreed, the first leader is the only member.
        first = {leader.rank: Place(leader.host, leader.port)} if leader else {rank: address}
        self.memberships = [Membership((-1, -1), leader.rank if leader else rank, first)]
        self._handlers: dict[type[Message], Callable[[Any], bool]] = {
            Who: lambda message: True,
            Poll: self._would_vote,
            Campaign: self._vote,
            Propose: self._acknowledge,
            Leads: self._accept_leader,
        }
        if leader is not None:
            self.follow(leader)

    @property
    def newest(self) -> Membership:
        return self.memberships[-1]

    def members(self) -> Roster:
        """rank -> address, for all members of `memberships`."""
        return {rank: place for known in self.memberships for rank, place in known.roster.items()}

    def required(
        self, holders: Collection[int], outdated: Mapping[int, Position] | None = None, dead: Collection[int] = ()
    ) -> list[Membership]:
        """The memberships that each need a majority for a decision, oldest first.

        holders   ranks that have acknowledged the newest membership; if they are enough to agree on it, only the newest
                  membership is needed
        outdated  rank -> position of the rank's newest membership, for voters that will reject memberships of older
                  terms; a proposed membership is not needed if it cannot be agreed without these voters
        dead      ranks proven dead
        """
        required = list(self.memberships)
        if all(majority(holders, of.roster) for of in required):
            return required[-1:]
        while len(required) > 1:
            missing = {rank for rank, position in (outdated or {}).items() if position < required[-1].position}
            if all(majority(of.roster.keys() - missing, of.roster, dead) for of in required):
                break
            required.pop()
        return required

    # -- answers -----------------------------------------------------------------------------------------------

    def answer(self, message: Message) -> Answer:
        yes = self._handlers[type(message)](message)
        return Answer(yes, self.newest.position, self.term, self.leader)

    def _acknowledge(self, message: Propose) -> bool:
        if message.leader.term < self.term or not message.memberships:
            return False
        self.follow(message.leader)
        if message.memberships[-1].position < self.newest.position:  # a delayed proposal
            return False
        self.memberships = message.memberships
        return True

    def _accept_leader(self, message: Leads) -> bool:
        """Follows this leader if the leader's term is newer. Returns whether this voter would acknowledge the leader's
        next proposal."""
        self.follow(message.leader)
        return self.leader == message.leader and message.leader.term >= self.term

    def _would_vote(self, poll: Poll) -> bool:
        """Whether this voter would vote for the candidate now. Changes no state (Raft's pre-vote)."""
        if poll.position < self.newest.position or (self.leader is not None and self.leader.rank != poll.rank):
            return False
        voted = asyncio.get_running_loop().time() - self._voted_at < VOTE_SECONDS
        return not voted or self.vote == poll.rank or self.vote in poll.gone

    def _vote(self, campaign: Campaign) -> bool:
        if self.leader is not None and self.leader.rank != campaign.rank:
            return False
        self.learn(campaign.term)
        if (
            campaign.term < self.term
            or self.vote not in (None, campaign.rank)
            or campaign.position < self.newest.position
        ):
            return False
        self.vote = campaign.rank
        self._voted_at = asyncio.get_running_loop().time()
        return True

    # -- updates -----------------------------------------------------------------------------------------------

    def learn(self, term: int) -> None:
        """Adopts the term if it is newer, and resets the vote."""
        if term > self.term:
            self.term = term
            self.vote = None

    def follow(self, leader: Leader) -> None:
        """Follows a leader that has won its term, if that term is newer."""
        if leader.term > max(self.lost, self.leader.term if self.leader else -1):
            self.leader = leader
            self._voted_at = float("-inf")
            if leader.term > self.term:
                self.term = leader.term
                self.vote = leader.rank
            self.has_leader.set()
            self.leader_changed.set()
            self.leader_changed = asyncio.Event()

    def mark_lost(self, term: int, rank: int) -> None:
        """Marks the leader of `term` as lost, and drops the current leader if its term is not newer.

        rank: rank of this supervisor
        """
        self.lost = max(self.lost, term)
        self.learn(term)
        if self.leader is not None and self.leader.term <= term:
            if self.leader.rank != rank:
                self.lost_rank = self.leader.rank
            self.leader = None
            self.has_leader.clear()

    def learn_from(self, rank: int, answer: Answer) -> None:
        """Adopts the term and the leader in another voter's answer."""
        self.learn(answer.term)
        if (leader := answer.leader) is not None:
            if leader.rank == rank and leader.term == self.lost and self.leader is None:
                self.lost -= 1  # accept this leader again, because only the connection to it was lost
            self.follow(leader)

    def drop_proposals_after(self, position: Position) -> None:
        """Drops the memberships after this position, because they can no longer be agreed."""
        self.memberships = [known for known in self.memberships if known.position <= position]

    def mark_agreed(self, position: Position) -> None:
        """Drops the memberships before this position, because a majority has acknowledged the one at this position."""
        if any(known.position == position for known in self.memberships):
            self.memberships = [known for known in self.memberships if known.position >= position]
