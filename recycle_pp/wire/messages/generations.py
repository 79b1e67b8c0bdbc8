"""A generation: its announcement, the workers' reports, their plans, and broken links."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from recycle_schedules import Worker

from .table import COORDINATOR, WORKER, Message, sent


class Attempt(NamedTuple):
    """Number of repetitions of a step. A higher one voids all earlier work on the step.

    coarser   repeated because its sums overflowed; they now have other exponents
    repaired  repeated because a worker's state was wrong, so its peers computed with wrong weights from it
    """

    coarser: int = 0
    repaired: int = 0


FIRST = Attempt()


@sent(COORDINATOR, WORKER)
class Announce(Message, frozen=True):
    """Starts a generation. Messages of older ones are void.

    committed  newest committed step
    base       newest generation that connected all its members; these connections persist between survivors
    attempt    at the next step; work on it in an earlier attempt is void
    """

    generation: int
    members: list[Worker]
    committed: int
    base: int
    attempt: Attempt = FIRST


@sent(WORKER, COORDINATOR, of_generation=True)
class Report(Message, frozen=True):
    """The answer to an announcement.

    records  of uncommitted steps
    ahead    whether one of them is applied and need not be undone
    busy     seconds until the worker can start its next op
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

    sizes: list[int]
    units: list[int]
    loaded: int | None
    weights: int


@sent(COORDINATOR, WORKER, of_generation=True)
class Adopt(Message, frozen=True):
    """The rest of the interrupted steps.

    steps      step -> the worker's actions in it (`Actions.packed`)
    copy       peer that sends the stage's reduced gradients; None: no copy
    revoked    stages that must reduce their gradients again
    evaluate   validation to run first
    probes     host -> worker there, links to measure before anything else
    shares     of the worker's stage
    recompute  whether its layers run again in the backward pass, for micro-batches forwarded in these steps
    term       of the agreement that allowed this generation
    """

    generation: int
    steps: dict[int, bytes]
    copy: Worker | None
    revoked: list[int]
    evaluate: int | None
    stagger: bool
    shares: Shares
    probes: dict[str, Worker] = msgspec.field(default_factory=dict)
    recompute: bool = False
    term: int = 0


class Shares(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The holders of each unit of a stage's state (`protocol.holders`). Workers are given by pipeline.

    table      (number of neighbouring units, their holders, first holder first)
    together   all workers hold all units, and sum their gradients by one all-reduce
    copies     (unit, from, to), to be made first, in this order
    knows      a worker with the newest exponents, if weights are out of date and all are sent again; else None
    elsewhere  (unit, stage, workers there that have its sums), for units that other stages hold too
    """

    table: list[tuple[int, list[int]]]
    together: bool
    copies: list[tuple[int, int, int]]
    knows: int | None
    elsewhere: list[tuple[int, int, list[int]]] = msgspec.field(default_factory=list)

    @property
    def holders(self) -> list[list[int]]:
        """The holders of each unit, first holder first."""
        return [holders for count, holders in self.table for _ in range(count)]


@sent(COORDINATOR, WORKER, of_generation=True)
class SteadyPlan(Message, frozen=True):
    """The worker's actions in every undisturbed step, and in a validation (`Actions.packed`).

    recompute: see `Adopt`; for these steps"""

    generation: int
    steady: bytes
    forward: bytes
    recompute: bool = False


@sent(WORKER, COORDINATOR, of_generation=True)
class Resumed(Message, frozen=True):
    """The executor has resumed. times: ends of the phases (`telemetry.recovery`), seconds of the worker's monotonic
    clock."""

    generation: int
    times: dict[str, float]


@sent(WORKER, COORDINATOR, lasting=True)
class LinksMeasured(Message, frozen=True):
    """All measured links. machine: its own host; found: other host -> (seconds one way, bytes per second)."""

    machine: str
    found: dict[str, tuple[float, float]]


@sent(WORKER, COORDINATOR, of_generation=True)
class Broken(Message, frozen=True):
    """A link failed."""

    generation: int


@sent(WORKER, COORDINATOR)
class Unreachable(Message, frozen=True):
    """Connection attempts to these members have failed for `control.suspicion` seconds. Repeated while this lasts."""

    workers: list[Worker]
