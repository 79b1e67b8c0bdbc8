"""Between a worker and the coordinator. `protocol` says what follows from them.

(Longer than other files: it is the whole conversation, in both directions.)
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
    """resume: steps done of the checkpoint to begin at; 0: none. faults: that still have to strike it."""

    settings: Settings
    worker: Worker
    run_dir: str
    resume: int
    faults: list[Fault]


@sent(COORDINATOR, WORKER)
class StoreValues(Message, frozen=True):
    """What workers have set in the store (`comm.store`)."""

    values: list[tuple[str, bytes]]


class Attempt(NamedTuple):
    """How often a step has begun again. A larger one voids what was done of the step in a smaller one.

    coarser  as its sums did not fit: they have other exponents now
    mended   as a worker's state was wrong, and with it what others have computed of the weights that it sent
    """

    coarser: int = 0
    mended: int = 0


FIRST = Attempt()


@sent(COORDINATOR, WORKER)
class Announce(Message, frozen=True):
    """A generation begins; whatever belongs to an older one is void.

    committed  the newest step that is agreed
    base       the newest generation that made links between all its members: they stand where nobody has died since
    attempt    at the step after it: what was done of it in an earlier one is void
    """

    generation: int
    members: list[Worker]
    committed: int
    base: int
    attempt: Attempt = FIRST


class Shares(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who of a stage holds which block of the optimizer's state (`protocol.holders`). Workers by their pipelines.

    holders  of each block, the first one first
    copies   (block, from, to) that have to be made first, in this order
    knows    who has all the exponents, where some weights are out of date and all are sent anew; None: they are not
    elsewhere  (block, stage, first holder there) of blocks that other stages hold as well
    """

    holders: list[list[int]]
    copies: list[tuple[int, int, int]]
    knows: int | None
    elsewhere: list[tuple[int, int, int]] = msgspec.field(default_factory=list)


@sent(COORDINATOR, WORKER, of_generation=True)
class Adopt(Message, frozen=True):
    """What is left of the broken steps.

    steps     step -> the worker's actions in it (`Actions.packed`)
    copy      the stage's reduced gradients come from this peer
    revoked   stages whose reduced gradients have to be summed again
    evaluate  the validation that has to be done first
    probes    by host, the worker there with whom to measure the link to it, before anything else
    shares    of the worker's stage, with parallel.sharded
    recompute whether its layers run again in the backward of what it forwards in these steps
    term      of the agreement that allowed this generation
    """

    generation: int
    steps: dict[int, bytes]
    copy: Worker | None
    revoked: list[int]
    evaluate: int | None
    stagger: bool
    probes: dict[str, Worker] = msgspec.field(default_factory=dict)
    shares: Shares | None = None
    recompute: bool = False
    term: int = 0


@sent(COORDINATOR, WORKER, of_generation=True)
class SteadyPlan(Message, frozen=True):
    """The worker's actions in every step that nothing breaks, and in a validation (`Actions.packed`). recompute: as in
    `Adopt`, of these steps."""

    generation: int
    steady: bytes
    forward: bytes
    recompute: bool = False


@sent(COORDINATOR, WORKER)
class Commit(Message, frozen=True):
    """The job has agreed on a step: apply it with this clip scale (None: skip it, a gradient was not finite).

    norm, loss  of the step's gradient before clipping, and its mean
    hold        wait for the next generation
    replan      a better plan is on its way, for the next step on
    void        the update is not what the speculation had assumed
    evaluate    a validation follows
    savers      who saves a checkpoint: one worker a stage, or, of sharded state, all
    last        no step follows it in this job
    skipped     so many updates in a row are skipped, this one included
    stagger     the next step may be applied before it is agreed
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
    """From now on, give your state to this worker, which takes it at `address`."""

    to: Worker
    session: int
    address: Address | None = None


@sent(COORDINATOR, WORKER)
class Save(Message, frozen=True):
    """The end of the run: a saver died, take its part over; of sharded state, write all that you hold. step: steps
    done."""

    step: int


@sent(COORDINATOR, WORKER)
class Assemble(Message, frozen=True):
    """All stages are saved: make them one checkpoint. step: steps done; parts: the folders of its parts."""

    step: int
    parts: list[str] = msgspec.field(default_factory=list)


@sent(COORDINATOR, WORKER)
class Leave(Message, frozen=True):
    """The job goes on without this worker."""


@sent(COORDINATOR, WORKER)
class Exit(Message, frozen=True):
    """The job is over."""


# --------------------------------------------------------------------------------------- worker -> coordinator


class Reading(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """path: of the file; seconds: since the read began, 0 if none is under way."""

    path: str
    seconds: float


@sent(WORKER, COORDINATOR)
class WorkerHeartbeat(Message, frozen=True):
    """now: its monotonic clock; boot: whose clock that is (`telemetry.clocks`).

    delivered: the number of its main thread's activity (`supervisors.Signs`), if that is a wait that could end now.
    reading: the read of training data that has waited longest; None if this worker reads no file.
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
    blocks          the tensors of each block of its stage, with parallel.sharded
    memory          the fields of a `StageMemory` for each way in which the stage may run, if they were measured
    notes           sentences about its device for the user; the coordinator prints each sentence once
    data            fingerprint of the training data that it reads, "" if that does not matter
    """

    address: Address
    platform: str
    boundary_bytes: int = 0
    deferred_share: float = 0.0
    machine: str = ""
    cores: int = 0
    blocks: list[str] = msgspec.field(default_factory=list)
    memory: list[dict[str, float]] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)
    data: str = ""


@sent(WORKER, COORDINATOR, lasting=True)
class CannotRun(Message, frozen=True):
    """What the settings ask for cannot be done. reason: a sentence for the user."""

    reason: str


@sent(WORKER, COORDINATOR, lasting=True)
class Leaving(Message, frozen=True):
    """Its machine is about to be taken away: it leaves with the next commit if a peer stays."""


@sent(WORKER, COORDINATOR, of_generation=True)
class Broken(Message, frozen=True):
    """A link failed."""

    generation: int


@sent(WORKER, COORDINATOR)
class Unreachable(Message, frozen=True):
    """All attempts to connect to these members have failed for `control.suspicion` seconds. Repeated while it lasts."""

    workers: list[Worker]


class StepRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker has done of a step: see `protocol.ledger.Record`."""

    step: int
    done: dict[str, list[int]]
    reduced: bool


class Holds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker has of sharded optimizer state: see `protocol.holdings.Holdings`."""

    sizes: list[int]
    blocks: list[int]
    loaded: int | None
    weights: int


@sent(WORKER, COORDINATOR, of_generation=True)
class Report(Message, frozen=True):
    """The answer to an announcement.

    records  of the steps that are not agreed yet
    ahead    it has applied one of them, and need not take it back
    busy     seconds until it can start its next op
    holds    with parallel.sharded
    """

    generation: int
    records: list[StepRecord]
    ahead: bool
    busy: float
    holds: Holds | None = None


@sent(WORKER, COORDINATOR, of_generation=True)
class Resumed(Message, frozen=True):
    """The executor runs again. times: of the phases (`telemetry.recovery`), seconds of its monotonic clock."""

    generation: int
    times: dict[str, float]


@sent(WORKER, COORDINATOR, lasting=True)
class LinksMeasured(Message, frozen=True):
    """All links that it has measured. machine: its own host; found: by the other's, seconds one way, bytes a second."""

    machine: str
    found: dict[str, tuple[float, float]]


@sent(WORKER, COORDINATOR)
class OpProgress(Message, frozen=True):
    """What was done of a step since the last such message, and what begins now: kind, pipeline, index, start."""

    step: int
    spans: list[Span]
    running: tuple[str, int, int, float]


@sent(WORKER, COORDINATOR, lasting=True)
class Measured(Message, frozen=True):
    """Goes before the vote on a step: for the records only.

    spans         of all that it did in the step (`telemetry.packing`)
    samples       in the stage's gradient, each as often as it is; of the first stage, if they are logged
    logged_bytes  of boundary tensors that are kept
    cpu           seconds of processor time, since it started
    """

    step: int
    spans: bytes
    samples: list[int]
    logged_bytes: int
    lr: float
    cpu: float


@sent(WORKER, COORDINATOR, of_generation=True)
class Vote(Message, frozen=True):
    """What one worker says of its stage's reduced gradients in a step.

    finite   no NaN or infinity
    fits     no overflow of the fixed-point sums; else the step is done again with coarser ones
    wrong    (micro-batch, how often its gradient is in the sum) where that is not once
    digest   of everything that peers have in common
    squares  squared norm of every parameter's gradient, canonical order (float64); from whoever speaks for the stage
    losses   per micro-batch (pipeline-major), likewise
    blocks   of sharded state: a checksum (int64) of each block that it holds, as after the step before, in order
    changed  of sharded state, with control.mismatch=third: blocks that something other than an update has changed
    """

    generation: int
    step: int
    finite: bool
    fits: bool
    wrong: list[tuple[int, float]]
    digest: bytes
    squares: list[float]
    losses: list[float]
    blocks: bytes = b""
    changed: list[int] = msgspec.field(default_factory=list)


@sent(WORKER, COORDINATOR, lasting=True)
class Evaluated(Message, frozen=True):
    """A worker of the last stage has finished its part of a validation.

    losses  by number of the held-out micro-batch: those that ended at this worker
    total   held-out micro-batches of the whole validation
    """

    step: int
    losses: dict[int, float]
    total: int


@sent(WORKER, COORDINATOR, lasting=True)
class Finished(Message, frozen=True):
    """Its parameters are final. digests: of each, by canonical name."""

    digests: dict[str, str]


@sent(WORKER, COORDINATOR, lasting=True)
class Digests(Message, frozen=True):
    """Of its parameters, by canonical name, where a commit has brought a checkpoint. step: steps done."""

    step: int
    digests: dict[str, str]


@sent(WORKER, COORDINATOR)
class Synced(Message, frozen=True):
    """It has the parameters after a step, from the donor of this session."""

    step: int
    session: int


@sent(WORKER, COORDINATOR, lasting=True)
class Saved(Message, frozen=True):
    """Its part of a checkpoint is written.

    step   steps done, here and in the next three messages
    whole  the part is all of the sharded state that it holds, as `Save` asks for
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
    """The first message to a new coordinator: what `protocol.takeover.find` asks for.

    generation  newest announced one; -1 before the first
    agreed      term and number of the newest agreed one, whose `Adopt` has come; (-1, -1) before the first
    members     of the agreed generation
    base        of the announced generation, if its links stand
    commit      newest one
    attempt     at the step after it
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
