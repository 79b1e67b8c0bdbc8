"""Messages about a step: the ops that a worker runs, the worker's vote, and the commit."""

from __future__ import annotations

import msgspec

from .ctl import Value
from .islands import OuterOrder
from .members import Member
from .table import COORDINATOR, WORKER, Message, sent
from .units import UnitId

Span = tuple[str, int, int, float, float]
"""kind, pipeline, index, start, end; start and end are seconds of the worker's monotonic clock"""


@sent(WORKER, COORDINATOR)
class OpProgress(Message, frozen=True):
    """The worker's progress in a step.

    spans    ops completed since the last OpProgress
    running  the op that starts now: kind, pipeline, index, start
    """

    step: int
    spans: list[Span]
    running: tuple[str, int, int, float]


@sent(WORKER, COORDINATOR, lasting=True)
class Measured(Message, frozen=True):
    """Measurements of a step, for records only. Sent before the vote.

    spans         spans of all ops in the step (`timing.packing`)
    samples       sample ids in the stage's gradient, with multiplicity; only from the first stage, and only if sample
                  ids are logged
    logged_bytes  bytes of boundary tensors in the replay log
    lr            learning rate of the step
    cpu           seconds of processor time since the start of the worker
    memory        (peak, reserved) bytes since the start of the worker, see `execution.device.memory_used`
    """

    step: int
    spans: bytes
    samples: list[int]
    logged_bytes: int
    lr: float
    cpu: float
    memory: tuple[int, int] = (0, 0)


@sent(WORKER, COORDINATOR, of_generation=True)
class Vote(Message, frozen=True):
    """A worker's vote on its stage's reduced gradients in a step.

    finite     whether the gradients contain neither NaN nor infinity
    fits       whether the fixed-point sums did not overflow; else the step is repeated with coarser sums
    wrong      (micro-batch, multiplicity in the sum) for each micro-batch that is not in the sum exactly once
    digest     digest of all values that must be equal on all peers
    squares    squared norm of each unit's gradient, in the stage's order (float64); from one worker per stage
    losses     loss of each micro-batch, pipeline by pipeline; from the same worker, only in the last stage
    checksums  with parallel.sharded: checksum of each unit that the worker holds, in the state after the previous step,
               in the stage's order (int64)
    changed    with control.mismatch=third: units whose state has changed without an update
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
    changed: list[UnitId] = msgspec.field(default_factory=list)


@sent(COORDINATOR, WORKER)
class Commit(Message, frozen=True):
    """A step is committed: apply it.

    scale       clip scale of the update; None: skip the update, because a gradient was not finite
    norm, loss  norm of the step's gradient before clipping, and mean loss
    hold        whether to wait for the next generation
    replan      whether a better plan follows, to be used from the next step on
    void        whether workers that have updated their parameters before this commit must undo that update, because
                this one differs
    evaluate    whether a validation follows
    savers      members that save a checkpoint; a unit is saved by the first of its holders among them
    in_use      if there are savers: steps of older checkpoints whose files are still being written or uploaded; None:
                unknown, so the savers delete nothing
    last        whether this is the last step of the job
    skipped     number of consecutive skipped updates, including this one
    stagger     whether the next step may be applied before its commit
    changes     settings that have changed since the start of the job: key -> value
    outer       for an island, whether to cut a delta or to apply a round; else None
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
    savers: list[Member] = msgspec.field(default_factory=list)
    in_use: list[int] | None = None
    last: bool = False
    skipped: int = 0
    stagger: bool = False
    changes: dict[str, Value] = msgspec.field(default_factory=dict)
    outer: OuterOrder | None = None


@sent(WORKER, COORDINATOR, lasting=True)
class Evaluated(Message, frozen=True):
    """A worker of the last stage has finished its part of a validation.

    losses  index of a held-out micro-batch -> its loss, for the micro-batches that this worker finished
    total   number of held-out micro-batches in the whole validation
    """

    step: int
    losses: dict[int, float]
    total: int
