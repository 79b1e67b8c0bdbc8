"""Messages between the supervisors' agreements (`consensus.election`): questions and answers."""

from __future__ import annotations

from typing import NamedTuple

from .table import CANDIDATE, VOTER, Message, Vocabulary, sent


class Place(NamedTuple):
    """The address of a supervisor and its process (`consensus.process_identity`). process "": its death cannot be
    detected."""

    host: str
    port: int
    process: str = ""


Position = tuple[int, int]
"""term, generation"""


class Leader(NamedTuple):
    """The supervisor that hosts the coordinator. At most one per term; terms only grow."""

    term: int
    rank: int
    host: str
    port: int


class Membership(NamedTuple):
    """leader: the proposer, which acknowledges first; roster: addresses of the supervisors, by rank."""

    position: Position
    leader: int
    roster: dict[int, Place]


@sent(CANDIDATE, VOTER)
class Who(Message, frozen=True):
    """Requests the current leader."""


@sent(CANDIDATE, VOTER)
class Poll(Message, frozen=True):
    """Asks for a vote without a new term. gone: ranks known to be dead; position: of the candidate's newest
    membership."""

    rank: int
    position: Position
    gone: list[int]


@sent(CANDIDATE, VOTER)
class Campaign(Message, frozen=True):
    """Asks for a vote in this term. position: of the candidate's newest membership."""

    term: int
    rank: int
    position: Position


@sent(CANDIDATE, VOTER)
class Propose(Message, frozen=True):
    """Asks to acknowledge these memberships. The last one is new."""

    leader: Leader
    memberships: list[Membership]


@sent(CANDIDATE, VOTER)
class Leads(Message, frozen=True):
    leader: Leader


@sent(VOTER, CANDIDATE)
class Answer(Message, frozen=True):
    """position: of the voter's newest membership; term: the newest known; leader: the leader that it follows."""

    yes: bool
    position: Position
    term: int
    leader: Leader | None


TO_VOTER, TO_CANDIDATE = Vocabulary(CANDIDATE, VOTER), Vocabulary(VOTER, CANDIDATE)
