"""The validation under way: which losses are there, of which are missing.

validation = Validation(microbatches=8)          # in all of it
validation.begin(step=99)                        # with the parameters after that step
loss = validation.counted(message)               # their mean once all are there, else None
validation.step                                  # None: none is under way
"""

from __future__ import annotations

from recycle_pp.wire.messages.workers import Evaluated


class Validation:
    def __init__(self, microbatches: int) -> None:
        self._microbatches = microbatches
        self.begin(None)

    def begin(self, step: int | None) -> None:
        """None: what is missing of the last one stays so."""
        self.step: int | None = step
        self._losses: dict[int, float] = {}

    def counted(self, message: Evaluated) -> float | None:
        """Counts whatever generation this is: what it was measured with is agreed."""
        if message.step != self.step:
            return None
        self._losses |= message.losses
        if len(self._losses) < self._microbatches:
            return None
        mean = sum(self._losses[g] for g in sorted(self._losses)) / len(self._losses)
        self.begin(None)
        return mean
