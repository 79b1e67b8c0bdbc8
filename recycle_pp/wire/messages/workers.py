"""Messages between a worker and the coordinator. `protocol` defines the reactions.

(Longer than other files because it has all messages of both directions.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Union

import msgspec
from recycle_schedules import Worker

from recycle_pp.config.faults import Fault
from recycle_pp.config.settings import Settings

from .table import COORDINATOR, MESSAGES, WORKER, Message, Vocabulary, sent

Span = tuple[str, int, int, float, float]
"""kind, pipeline, index, start, end: seconds of the worker's monotonic clock"""

# --------------------------------------------------------------------------------------- coordinator -> worker


Address = tuple[str, int]
"""host, port"""


@sent(COORDINATOR, WORKER)
class WorkerWelcome(Message, frozen=True):
    """resume: completed steps in the checkpoint to load; 0: none. faults: injected faults that have not fired yet."""

    settings: Settings
    worker: Worker
    run_dir: str
    resume: int
    faults: list[Fault]


@sent(COORDINATOR, WORKER)
class StoreValues(Message, frozen=True):
    """Values that workers have set in the store (`comm.store`)."""

    values: list[tuple[str, bytes]]


class Attempt(NamedTuple):
    """Number of repetitions of a step. A higher one voids all earlier work on the step.

    coarser  repeated because its sums overflowed; they now have other exponents
    mended   repeated because a worker's state was wrong, so its peers computed with wrong weights from it
    """

    coarser: int = 0
    mended: int = 0


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


@sent(COORDINATOR, WORKER, of_generation=True)
class SteadyPlan(Message, frozen=True):
    """The worker's actions in every undisturbed step, and in a validation (`Actions.packed`).

    recompute: see `Adopt`; for these steps"""

    generation: int
    steady: bytes
    forward: bytes
    recompute: bool = False


@sent(COORDINATOR, WORKER)
class Commit(Message, frozen=True):
    """A step is committed: apply it with this clip scale (None: skip it, because a gradient was not finite).

    norm, loss  norm of the step's gradient before clipping, and mean loss
    hold        wait for the next generation
    replan      a better plan follows, for the next step on
    void        the update differs from the speculative one
    evaluate    a validation follows
    savers      workers that save a checkpoint; a unit is saved by the first of its holders among them
    last        the last step of this job
    skipped     consecutive skipped updates, including this one
    stagger     the next step may be applied before its commit
    """

    generation: int
    step: int
    scale: float | None
    norm: float
    loss: float
    hold: bool = False
    replan: bool = False
    void: bool = False
    evaluate: bool = False
    savers: list[Worker] = msgspec.field(default_factory=list)
    last: bool = False
    skipped: int = 0
    stagger: bool = False


@sent(COORDINATOR, WORKER)
class Donate(Message, frozen=True):
    """Send the state of these units, and later updates, to a worker that receives it at `address`.

    session  larger than that of any earlier attempt; messages of older sessions are void
    units    empty: all units of the stage
    of       number of units that the worker receives in this session, from all donors
    """

    to: Worker
    session: int
    address: Address | None = None
    units: list[int] = msgspec.field(default_factory=list)
    of: int = 0


@sent(COORDINATOR, WORKER)
class Save(Message, frozen=True):
    """At the end of the run, a saver died: write all units that you hold. step: completed steps."""

    step: int


@sent(COORDINATOR, WORKER)
class Assemble(Message, frozen=True):
    """All stages are saved: merge the parts into one checkpoint. step: completed steps; parts: their folders."""

    step: int
    parts: list[str] = msgspec.field(default_factory=list)


@sent(COORDINATOR, WORKER)
class Leave(Message, frozen=True):
    """The job continues without this worker."""


@sent(COORDINATOR, WORKER)
class Exit(Message, frozen=True):
    """The job is over."""


# --------------------------------------------------------------------------------------- worker -> coordinator


class Reading(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """path: of the file; seconds: since the read started; 0: no read in progress."""

    path: str
    seconds: float


@sent(WORKER, COORDINATOR)
class WorkerHeartbeat(Message, frozen=True):
    """Sent regularly by a thread of the worker.

    now        the worker's monotonic clock, in seconds
    boot       identity of that clock (`telemetry.clocks`)
    delivered  number of the main thread's activity (`supervisors.Signs`), if it is a wait that could end now
    reading    the longest pending read of training data; None if this worker reads no file
    """

    now: float
    boot: str
    delivered: int | None = None
    reading: Reading | None = None


@sent(WORKER, COORDINATOR)
class StoreValue(Message, frozen=True):
    """Sets a key of the workers' shared store (`comm.store`)."""

    key: str
    value: bytes


@sent(WORKER, COORDINATOR, lasting=True)
class Ready(Message, frozen=True):
    """The worker has built its stage.

    address         where it receives a donor's state
    platform        see `execution.device`
    boundary_bytes  output of its stage for a micro-batch
    deferred_share  share of its parameters whose gradients come with W
    machine         name shared by all workers that use the same cores
    cores           of that machine
    units           names of the units of its stage
    memory          the fields of a `StageMemory` for each way in which the stage may run, if they were measured
    notes           sentences about its device for the user; the coordinator prints each sentence once
    data            fingerprint of its training data; "" if it is irrelevant
    """

    address: Address
    platform: str
    boundary_bytes: int = 0
    deferred_share: float = 0.0
    machine: str = ""
    cores: int = 0
    units: list[str] = msgspec.field(default_factory=list)
    memory: list[dict[str, float]] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)
    data: str = ""


@sent(WORKER, COORDINATOR, lasting=True)
class CannotRun(Message, frozen=True):
    """The settings cannot be fulfilled. reason: a sentence for the user."""

    reason: str


@sent(WORKER, COORDINATOR, lasting=True)
class Leaving(Message, frozen=True):
    """The worker's machine is about to be reclaimed. It leaves at the next commit, if its stage keeps a peer."""


@sent(WORKER, COORDINATOR, of_generation=True)
class Broken(Message, frozen=True):
    """A link failed."""

    generation: int


@sent(WORKER, COORDINATOR)
class Unreachable(Message, frozen=True):
    """Connection attempts to these members have failed for `control.suspicion` seconds. Repeated while this lasts."""

    workers: list[Worker]


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


@sent(WORKER, COORDINATOR)
class OpProgress(Message, frozen=True):
    """Ops completed in a step since the last such message, and the op that starts now: kind, pipeline, index, start."""

    step: int
    spans: list[Span]
    running: tuple[str, int, int, float]


@sent(WORKER, COORDINATOR, lasting=True)
class Measured(Message, frozen=True):
    """Measurements of a step, for records only. Sent before the vote.

    spans         of all ops in the step (`telemetry.packing`)
    samples       sample ids in the stage's gradient, with multiplicity; from the first stage, if they are logged
    logged_bytes  of boundary tensors in the replay log
    cpu           seconds of processor time since the start of the worker
    """

    step: int
    spans: bytes
    samples: list[int]
    logged_bytes: int
    lr: float
    cpu: float


@sent(WORKER, COORDINATOR, of_generation=True)
class Vote(Message, frozen=True):
    """A worker's vote on its stage's reduced gradients in a step.

    finite     no NaN or infinity
    fits       no overflow of the fixed-point sums; otherwise the step is repeated with coarser ones
    wrong      (micro-batch, multiplicity in the sum) for each multiplicity other than one
    digest     of all values that peers must agree on
    squares    squared norm of every unit's gradient, canonical order (float64); from one worker per stage
    losses     by micro-batch (pipeline-major); from the same worker
    checksums  with parallel.sharded: of each unit that it holds, after the previous step, in order (int64)
    changed    with control.mismatch=third: units that have changed without an update
    """

    generation: int
    step: int
    finite: bool
    fits: bool
    wrong: list[tuple[int, float]]
    digest: bytes
    squares: list[float]
    losses: list[float]
    checksums: bytes = b""
    changed: list[int] = msgspec.field(default_factory=list)


@sent(WORKER, COORDINATOR, lasting=True)
class Evaluated(Message, frozen=True):
    """A worker of the last stage has finished its part of a validation.

    losses  by index of the held-out micro-batch, for those that this worker finished
    total   held-out micro-batches of the whole validation
    """

    step: int
    losses: dict[int, float]
    total: int


@sent(WORKER, COORDINATOR, lasting=True)
class Finished(Message, frozen=True):
    """The worker's parameters are final. digests: SHA-256 of each, by canonical name."""

    digests: dict[str, str]


@sent(WORKER, COORDINATOR, lasting=True)
class Digests(Message, frozen=True):
    """SHA-256 of the worker's parameters, by canonical name, after the commit of a checkpoint. step: completed
    steps."""

    step: int
    digests: dict[str, str]


@sent(WORKER, COORDINATOR)
class Synced(Message, frozen=True):
    """The worker has its units in the state after a step. session: that of its donors."""

    step: int
    session: int


@sent(WORKER, COORDINATOR, lasting=True)
class Saved(Message, frozen=True):
    """The worker has written its part of a checkpoint.

    step   completed steps, here and in the next three messages
    whole  the part has all units that the worker holds, as requested by `Save`
    part   name of the part's folder
    """

    step: int
    whole: bool = False
    part: str = ""


@sent(WORKER, COORDINATOR, lasting=True)
class SaveFailed(Message, frozen=True):
    step: int
    detail: str


@sent(WORKER, COORDINATOR, lasting=True)
class Assembling(Message, frozen=True):
    step: int


@sent(WORKER, COORDINATOR, lasting=True)
class Assembled(Message, frozen=True):
    step: int


LASTING = tuple(cls for cls, rule in MESSAGES.items() if rule.lasting)

if TYPE_CHECKING:
    Lasting = Message
else:
    Lasting = Union[LASTING]  # noqa: UP007


@sent(WORKER, COORDINATOR)
class State(Message, frozen=True):
    """The first message to a new coordinator: the input of `protocol.takeover.find`.

    generation  newest announced generation; -1 before the first
    agreed      (term, number) of the newest agreed generation, whose `Adopt` has arrived; (-1, -1) before the first
    members     of the agreed generation
    base        of the announced generation, if its links are up; else None
    commit      newest one
    attempt     at the next step
    said        last message of each lasting kind
    """

    generation: int = -1
    members: list[Worker] = msgspec.field(default_factory=list)
    base: int | None = None
    committed: int = -1
    commit: Commit | None = None
    said: list[Lasting] = msgspec.field(default_factory=list)
    attempt: Attempt = FIRST
    agreed: tuple[int, int] = (-1, -1)


TO_WORKER, FROM_WORKER = Vocabulary(COORDINATOR, WORKER), Vocabulary(WORKER, COORDINATOR)
