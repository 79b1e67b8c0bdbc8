"""Between the supervisors' agreements (`consensus.election`): a question each, and its answer."""

from __future__ import annotations

from typing import NamedTuple

from .table import CANDIDATE, VOTER, Message, Vocabulary, sent


class Place(NamedTuple):
    """Where a supervisor listens, and which process it is (`consensus.process_identity`; "": nobody will know that it
    has died)."""

    host: str
    port: int
    process: str = ""


Position = tuple[int, int]
"""term, generation"""


class Leader(NamedTuple):
    """The supervisor that hosts the coordinator. At most one a term; terms only grow."""

    term: int
    rank: int
    host: str
    port: int


class Membership(NamedTuple):
    """leader: who proposed it, the first to acknowledge it; roster: where the supervisors listen, by rank."""

    position: Position
    leader: int
    roster: dict[int, Place]


@sent(CANDIDATE, VOTER)
class Who(Message, frozen=True):
    """Who leads?"""


@sent(CANDIDATE, VOTER)
class Poll(Message, frozen=True):
    """Would you vote for me? gone: whom the candidate knows to have died; position: of its newest membership."""

    rank: int
    position: Position
    gone: list[int]


@sent(CANDIDATE, VOTER)
class Campaign(Message, frozen=True):
    """Vote for me in this term. position: of the candidate's newest membership."""

    term: int
    rank: int
    position: Position


@sent(CANDIDATE, VOTER)
class Propose(Message, frozen=True):
    """Acknowledge these memberships, the last of them new."""

    leader: Leader
    memberships: list[Membership]


@sent(CANDIDATE, VOTER)
class Leads(Message, frozen=True):
    leader: Leader


@sent(VOTER, CANDIDATE)
class Answer(Message, frozen=True):
    """position: of the voter's newest membership; term: the newest that it knows; leader: whom it follows."""

    yes: bool
    position: Position
    term: int
    leader: Leader | None


TO_VOTER, TO_CANDIDATE = Vocabulary(CANDIDATE, VOTER), Vocabulary(VOTER, CANDIDATE)
