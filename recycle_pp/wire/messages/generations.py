"""Messages about a generation: its announcement, the workers' reports, their plans, and broken links."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import NamedTuple

import msgspec

from .islands import OuterState
from .members import Assignment, Member
from .table import COORDINATOR, WORKER, Message, sent
from .units import Layout, UnitId, UnitRuns, packed, unpacked


class Attempt(NamedTuple):
    """The number of repetitions of a step, by cause. A higher attempt makes all earlier work on the step void.

    coarser   number of repetitions after an overflow of the sums; the next attempt uses other exponents
    repaired  number of repetitions because a worker's state was wrong and its peers had received wrong weights
    """

    coarser: int = 0
    repaired: int = 0


FIRST = Attempt()


@sent(COORDINATOR, WORKER)
class Announce(Message, frozen=True):
    """Starts a generation. Messages of older generations are void.

    members    member -> the worker that it plays
    committed  newest committed step
    base       newest generation that rebuilt all connections; later generations keep connections between survivors
    attempt    current attempt at the next step; work of earlier attempts is void
    layout     the layers of every stage
    """

    generation: int
    members: Assignment
    committed: int
    base: int
    attempt: Attempt = FIRST
    layout: Layout = msgspec.field(default_factory=dict)


@sent(WORKER, COORDINATOR, of_generation=True)
class Report(Message, frozen=True):
    """The answer to an announcement.

    records  the worker's records of uncommitted steps
    ahead    whether the worker has applied an uncommitted step that need not be undone
    busy     seconds until the worker can start its next op
    holds    the state that the worker holds
    """

    generation: int
    records: list[StepRecord]
    ahead: bool
    busy: float
    holds: Holds


class StepRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker's part of a step, see `protocol.ledger.Record`."""

    step: int
    done: dict[str, list[int]]
    reduced: bool


class Holds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state that a worker holds, see `protocol.holdings.Holdings`."""

    units: UnitRuns
    loaded: int | None
    weights: int


@sent(COORDINATOR, WORKER, of_generation=True)
class Adopt(Message, frozen=True):
    """A worker's orders for a generation: the rest of the interrupted steps.

    steps      step -> the worker's actions in that step (`Actions.packed`)
    copy       member that sends the stage's reduced gradients; None: no copy
    revoked    stages that must reduce their gradients again
    evaluate   step of a validation that must run first; None: no validation
    stagger    whether the worker may apply the next step before its commit
    shares     the holders of the units of the worker's stage
    probes     host -> a member on that host; the worker measures the links to these members before anything else
    recompute  whether the backward pass runs the worker's layers again, for micro-batches whose forward pass is in
               `steps`
    term       term of the agreement that allowed this generation
    outer      for an island, its position in the rounds; else None
    """

    generation: int
    steps: dict[int, bytes]
    copy: Member | None
    revoked: list[int]
    evaluate: int | None
    stagger: bool
    shares: Shares
    probes: dict[str, Member] = msgspec.field(default_factory=dict)
    recompute: bool = False
    term: int = 0
    outer: OuterState | None = None


Copy = tuple[UnitId, Member, Member]
"""unit, from, to"""


class Shares(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The holders of each unit of a stage's state (`protocol.holders`).

    units      the stage's units, in order
    table      runs of neighbouring units with the same holders, in the same order: (number of units, their holders,
               first holder first)
    together   whether all members of the stage hold all units, and sum their gradients by one all-reduce
    copies     (unit, from, to): copies of units to make first, in this order
    knows      a member with the newest exponents, if all weights are sent again because some are out of date; else
               None
    elsewhere  for each unit that another stage holds too: (unit, other stage, members of that stage that have the
               unit's sum)
    """

    units: UnitRuns
    table: list[tuple[int, list[Member]]]
    together: bool
    copies: list[Copy]
    knows: Member | None
    elsewhere: list[tuple[UnitId, int, list[Member]]] = msgspec.field(default_factory=list)

    @classmethod
    def of(
        cls, holders: Mapping[UnitId, list[Member]], together: bool, copies: list[Copy], knows: Member | None
    ) -> Shares:
        """The shares with these holders.

        holders: unit -> its holders, first holder first; the units in the stage's order
        """
        table = [(len(list(run)), of) for of, run in groupby(holders.values())]
        return cls(packed(holders), table, together, copies, knows)

    @property
    def holders(self) -> dict[UnitId, list[Member]]:
        """The holders of each unit, first holder first; the units in the stage's order."""
        holders = (of for count, of in self.table for _ in range(count))
        return dict(zip(unpacked(self.units), holders, strict=True))


@sent(COORDINATOR, WORKER, of_generation=True)
class SteadyPlan(Message, frozen=True):
    """The worker's actions in a step without a death, and in a validation (`Actions.packed`).

    steady     actions in a step
    forward    actions in a validation
    recompute  see `Adopt`; applies to micro-batches whose forward pass is in a step of this plan
    """

    generation: int
    steady: bytes
    forward: bytes
    recompute: bool = False


@sent(WORKER, COORDINATOR, of_generation=True)
class Resumed(Message, frozen=True):
    """The executor has resumed.

    times: phase of the recovery (`telemetry.recovery`) -> its end, in seconds of the worker's monotonic clock
    """

    generation: int
    times: dict[str, float]


@sent(WORKER, COORDINATOR, lasting=True)
class LinksMeasured(Message, frozen=True):
    """All links that the worker has measured.

    machine  the worker's host
    found    other host -> (seconds one way, bytes per second)
    """

    machine: str
    found: dict[str, tuple[float, float]]


@sent(WORKER, COORDINATOR, of_generation=True)
class Broken(Message, frozen=True):
    """A link of the worker has failed. reason: the back end's error message."""

    generation: int
    reason: str = ""


@sent(WORKER, COORDINATOR)
class Unreachable(Message, frozen=True):
    """Connection attempts to these members have failed for `control.suspicion` seconds. Repeated while this lasts."""

    members: list[Member]
