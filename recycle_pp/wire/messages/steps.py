"""A step: the ops that a worker runs, its vote, and the commit."""

from __future__ import annotations

import msgspec
from recycle_schedules import Worker

from .table import COORDINATOR, WORKER, Message, sent

Span = tuple[str, int, int, float, float]
"""kind, pipeline, index, start, end: seconds of the worker's monotonic clock"""


@sent(WORKER, COORDINATOR)
class OpProgress(Message, frozen=True):
    """Ops completed in a step since the last such message, and the op that starts now: kind, pipeline, index, start."""

    step: int
    spans: list[Span]
    running: tuple[str, int, int, float]


@sent(WORKER, COORDINATOR, lasting=True)
class Measured(Message, frozen=True):
    """Measurements of a step, for records only. Sent before the vote.

    spans         of all ops in the step (`timing.packing`)
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


@sent(WORKER, COORDINATOR, lasting=True)
class Evaluated(Message, frozen=True):
    """A worker of the last stage has finished its part of a validation.

    losses  by index of the held-out micro-batch, for those that this worker finished
    total   held-out micro-batches of the whole validation
    """

    step: int
    losses: dict[int, float]
    total: int
