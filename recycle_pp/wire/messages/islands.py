"""Messages about the rounds of an island (`recycle_pp.islands`).

A round is one outer step of all islands. An island *cuts* its delta after a number of its own steps, uploads it, and
*applies* the round when theta after the round is known.
"""

from __future__ import annotations

import msgspec

from .members import Member
from .table import COORDINATOR, WORKER, Message, sent
from .units import UnitId


class OuterState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The position of an island in the rounds, after one of its steps.

    applied  number of rounds in theta; also the number of the round that the island takes part in now
    begun    number of completed steps at which the island began to work on this round
    sent     number of completed steps at which the island cut its delta of this round; None: not yet
    mine     round -> number of steps at which this island cut a delta that is in the store. If an earlier start cut it,
             the island repeats these steps, because its checkpoint is older, and must cut at the same ones
    """

    applied: int = 0
    begun: int = 0
    sent: int | None = None
    mine: dict[int, int] = msgspec.field(default_factory=dict)


class OuterOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of a commit that concerns the rounds.

    state    the position after the commit
    apply    number of rounds in theta after this commit, to be applied before the update; None: no round is applied
    cut      whether to cut a delta after the update
    samples  number of samples in the delta that is cut, in micro-batches
    """

    state: OuterState
    apply: int | None = None
    cut: bool = False
    samples: int = 0

    @property
    def changes_state(self) -> bool:
        """Whether the commit changes the state in addition to the update."""
        return self.cut or self.apply is not None


class RoundStatistics(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker's part of the statistics of a round, over the units that it is the first holder of.

    round   number of the round
    shares  island -> number of samples of its delta
    square  squared norm of the mean delta
    dots    island -> other island -> dot product of their deltas; each pair once, and each island with itself
    refused reasons why objects were not used, with their names
    """

    round: int
    shares: dict[str, int]
    square: float
    dots: dict[str, dict[str, float]]
    refused: list[str] = msgspec.field(default_factory=list)


@sent(WORKER, COORDINATOR, of_generation=True)
class RoundReady(Message, frozen=True):
    """The worker has computed theta for all its units. Repeated in every generation.

    applied     number of rounds in this theta
    statistics  of each of these rounds
    mine        see `OuterState`, for the closed rounds in this theta that the island has not applied yet
    """

    generation: int
    applied: int
    statistics: list[RoundStatistics] = msgspec.field(default_factory=list)
    mine: dict[int, int] = msgspec.field(default_factory=dict)


@sent(COORDINATOR, WORKER)
class RoundGoal(Message, frozen=True):
    """Another worker has computed theta after `applied` rounds, which is newer than the one this worker has reported.
    Without this message, a worker keeps the theta that it has reported until a commit applies it.
    """

    generation: int
    applied: int


@sent(WORKER, COORDINATOR, of_generation=True)
class CutMissing(Message, frozen=True):
    """The worker lacks deltas of the current round, because it joined after they were cut. Sent at the beginning of a
    generation.

    sent   number of steps at which they were cut
    units  each unit whose delta the worker lacks, with all holders of the unit
    """

    generation: int
    sent: int
    units: list[tuple[UnitId, list[Member]]]


@sent(WORKER, COORDINATOR)
class IslandsSeen(Message, frozen=True):
    """The state of all islands according to the store, for records only. Sent by one worker of the island whenever this
    state changes, and again in every generation.

    live    names of islands whose lease is valid, including this island
    silent  names of islands whose lease has not been renewed for `rounds.GONE_SECONDS`
    closed  number of each closed round that this island has not applied yet -> island -> number of its samples
    """

    live: list[str]
    silent: list[str]
    closed: dict[int, dict[str, int]]


@sent(WORKER, COORDINATOR)
class StoreTraffic(Message, frozen=True):
    """Measurements of the worker's traffic with the store of the islands, for records only.

    sent, received  bytes since the worker's last message of this kind
    failing         seconds since the store's last answer if the latest request failed, else 0
    detail          the latest failure in words; "" without one
    """

    sent: int
    received: int
    failing: float = 0.0
    detail: str = ""
