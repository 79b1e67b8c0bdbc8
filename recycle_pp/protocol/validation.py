"""A validation: which held-out micro-batches the workers run, and the coordinator's count of their losses.

    each = per_pass(wanted=16, pipelines=3, microbatches=6)       # micro-batches of a pipeline in one pass
    for number, action in numbered(actions, pipelines=3, each=each, total=16): ...      # a worker's whole validation

    validation = Validation()
    validation.begin(step=99)                        # with the parameters after that step
    found = validation.counted(message)              # once all losses have arrived, else None
    validation.step                                  # None: no validation is under way

The held-out micro-batches are numbered from 0 and dealt to the pipelines in turn. Their number depends on neither D nor
P nor on deaths, so the loss does not either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from recycle_schedules import Action

from recycle_pp.wire.messages.workers import Evaluated


def per_pass(wanted: int, pipelines: int, microbatches: int) -> int:
    """Micro-batches of each pipeline in one pass over the plan's routes, for `wanted` in all. A plan has routes for
    `microbatches` of each pipeline; more than that takes several passes."""
    return min(microbatches, -(-wanted // pipelines))


def numbered(actions: Iterable[Action], pipelines: int, each: int, total: int) -> Iterator[tuple[int, Action]]:
    """A worker's actions in a validation of `total` held-out micro-batches, each with the number of its micro-batch.

    actions: those of one pass, for the first `each` micro-batches of every pipeline. Passes follow each other; the last
    one leaves out the numbers from `total` on. The order of messages is the same on all workers."""
    one_pass = list(actions)
    for first in range(0, total, pipelines * each):
        for action in one_pass:
            assert action.microbatch is not None
            pipeline, index = action.microbatch
            number = first + index * pipelines + pipeline
            if number < total:
                yield number, action


class Measured(NamedTuple):
    """loss: mean over the micro-batches. microbatches: how many."""

    loss: float
    microbatches: int


class Validation:
    def __init__(self) -> None:
        self.begin(None)

    def begin(self, step: int | None) -> None:
        """None: losses that are still missing stay missing."""
        self.step: int | None = step
        self._losses: dict[int, float] = {}

    def counted(self, message: Evaluated) -> Measured | None:
        """Counts losses of any generation: the parameters they were measured with are agreed."""
        if message.step != self.step:
            return None
        self._losses |= message.losses
        if len(self._losses) < message.total:
            return None
        loss = sum(self._losses[number] for number in sorted(self._losses)) / message.total
        self.begin(None)
        return Measured(loss, message.total)
