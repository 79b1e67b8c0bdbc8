"""A validation: selects the held-out micro-batches for each worker, and collects their losses on the coordinator.

    each = per_pass(wanted=16, pipelines=3, microbatches=6)       # micro-batches per pipeline and pass
    for number, action in numbered(actions, pipelines=3, each=each, total=16): ...      # a worker's whole validation

    validation = Validation()
    validation.begin(step=99)                        # with the parameters after that step
    found = validation.counted(message)              # the result once all losses have arrived, else None
    validation.step                                  # None if no validation is running

The held-out micro-batches are numbered from 0 and dealt to the pipelines in turn. Their number does not depend on
pipelines, stages or deaths, so the loss does not either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from recycle_schedules import Action

from recycle_pp.wire.messages.steps import Evaluated


def per_pass(wanted: int, pipelines: int, microbatches: int) -> int:
    """Number of micro-batches per pipeline in one pass of a validation. The validation has `wanted` micro-batches in
    total. A plan has routes for only `microbatches` per pipeline, so a large validation needs several passes."""
    return min(microbatches, -(-wanted // pipelines))


def numbered(actions: Iterable[Action], pipelines: int, each: int, total: int) -> Iterator[tuple[int, Action]]:
    """A worker's actions in a validation of `total` held-out micro-batches, each with the number of its micro-batch.

    actions: the worker's actions in one pass, for the first `each` micro-batches of every pipeline

    Passes run one after another. The last pass omits numbers >= `total`. The order is the same on all workers."""
    one_pass = list(actions)
    for first in range(0, total, pipelines * each):
        for action in one_pass:
            assert action.microbatch is not None
            pipeline, index = action.microbatch
            number = first + index * pipelines + pipeline
            if number < total:
                yield number, action


class Measured(NamedTuple):
    """The result of a validation. loss: mean over its micro-batches. microbatches: their number."""

    loss: float
    microbatches: int


class Validation:
    def __init__(self) -> None:
        self.begin(None)

    def begin(self, step: int | None) -> None:
        """Starts a validation. None: drops the current one."""
        self.step: int | None = step
        self._losses: dict[int, float] = {}

    def counted(self, message: Evaluated) -> Measured | None:
        """Adds the losses in a message. Returns the result once all losses have arrived, else None. Counts losses of
        any generation, because they were computed with committed parameters."""
        if message.step != self.step:
            return None
        self._losses |= message.losses
        if len(self._losses) < message.total:
            return None
        loss = sum(self._losses[number] for number in sorted(self._losses)) / message.total
        self.begin(None)
        return Measured(loss, message.total)
