"""Questions and answers with which supervisors agree on a leader and a membership (`consensus.election`)."""

from __future__ import annotations

from typing import NamedTuple

from recycle_pp.wire.launch import joined

from .table import CANDIDATE, VOTER, Message, Vocabulary, sent


class Place(NamedTuple):
    """The address of a supervisor.

    process: identity of the supervisor's process (`consensus.process_identity`); if "", peers cannot detect its death
    """

    host: str
    port: int
    process: str = ""

    def __str__(self) -> str:
        return joined(self.host, self.port)


Position = tuple[int, int]
"""term, generation"""


class Leader(NamedTuple):
    """The supervisor that hosts the coordinator. A term has at most one leader, and terms only grow."""

    term: int
    rank: int
    host: str
    port: int

    def __str__(self) -> str:
        return joined(self.host, self.port)


class Takeover(NamedTuple):
    """The election after the loss of a coordinator. Times are time.monotonic() of the new coordinator."""

    rank: int  # rank of the supervisor that hosts the new coordinator
    lost_rank: int
    lost_at: float
    elected_at: float


class Membership(NamedTuple):
    """A membership: the supervisors that are part of the job.

    leader  rank of the supervisor that proposes the membership, and acknowledges it first
    roster  rank -> address of the supervisor
    """

    position: Position
    leader: int
    roster: dict[int, Place]


@sent(CANDIDATE, VOTER)
class Who(Message, frozen=True):
    """Asks which leader the voter follows."""


@sent(CANDIDATE, VOTER)
class Poll(Message, frozen=True):
    """Asks whether the voter would vote for this candidate. Starts no new term.

    position  position of the candidate's newest membership
    gone      ranks that are known to be dead
    """

    rank: int
    position: Position
    gone: list[int]


@sent(CANDIDATE, VOTER)
class Campaign(Message, frozen=True):
    """Asks for a vote in this term. position: position of the candidate's newest membership."""

    term: int
    rank: int
    position: Position


@sent(CANDIDATE, VOTER)
class Propose(Message, frozen=True):
    """Asks the voter to acknowledge these memberships. The last one is new."""

    leader: Leader
    memberships: list[Membership]


@sent(CANDIDATE, VOTER)
class Leads(Message, frozen=True):
    """The sender is the leader. Asks whether the voter follows it."""

    leader: Leader


@sent(VOTER, CANDIDATE)
class Answer(Message, frozen=True):
    """The voter's answer to `Who`, `Poll`, `Campaign`, `Propose` or `Leads`.

    yes       whether the voter agrees; always true for `Who`
    position  position of the voter's newest membership
    term      newest term that the voter knows
    leader    leader that the voter follows, if any
    """

    yes: bool
    position: Position
    term: int
    leader: Leader | None


@sent(VOTER, CANDIDATE)
class OtherJob(Message, frozen=True):
    """Answers each question of a candidate of an earlier job, whose supervisor had the voter's address."""


TO_VOTER, TO_CANDIDATE = Vocabulary(CANDIDATE, VOTER), Vocabulary(VOTER, CANDIDATE)
