"""Oobleck: pipelines of different lengths, from templates."""

from __future__ import annotations

import math
from functools import cache

from ..run import Run
from .base import Base


class Oobleck(Base):
    """All machines train, in pipelines whose lengths differ by at most one, each from a template planned in advance
    (Jang et al., SOSP'23, doi 10.1145/3600006.3613152). Every pipeline has at least P stages, because the model does
    not fit into fewer. Micro-batches are divided so that all pipelines end together. The number of pipelines is the one
    with the shortest step on the machines that are up.

    Every change of membership costs the step and `reconfigure` seconds. ReCycle's authors measured 79.4 % and 88.1 %
    of the fault-free throughput on their trace (two models)."""

    def begin(self, run: Run) -> None:
        super().begin(run)
        self._set()

    def lost(self, machine: int) -> None:
        self._change()

    def gained(self, machine: int) -> None:
        self._change()

    def _change(self) -> None:
        self.run.drop_step()
        self.run.stall(self.costs.reconfigure)
        self._set()

    def _set(self) -> None:
        machines = min(len(self.run.up), self.job.workers)
        self.run.advance(self._step(machines), machines if machines >= self.job.stages else 0)

    @cache  # noqa: B019  (lives as long as the simulation)
    def _step(self, machines: int) -> float | None:
        """Seconds of a step with this number of machines; None if they are too few for a pipeline."""
        most = min(self.job.pipelines, machines // self.job.stages)
        if not most:
            return None
        fewest = max(1, math.ceil(most / 2))  # with fewer pipelines, each would be twice as long and mostly idle
        return min(self._of(machines, k) for k in range(fewest, most + 1))

    def _of(self, machines: int, pipelines: int) -> float:
        """Seconds of a step on `pipelines` pipelines of almost equal length."""
        short, longer = machines // pipelines, machines % pipelines
        total, best = self.job.total, math.inf
        even = total / pipelines
        if not longer:
            return self._pipeline(short, math.ceil(even))
        # m: micro-batches of a short pipeline, at most an even share, because longer pipelines are at least as fast
        for m in range(math.floor(even * 0.7), math.ceil(even) + 1):
            rest = math.ceil((total - m * (pipelines - longer)) / longer)
            if m >= 1 and rest >= 1:
                best = min(best, max(self._pipeline(short, m), self._pipeline(short + 1, rest)))
        return best

    def _pipeline(self, stages: int, microbatches: int) -> float:
        """Seconds of a 1F1B step of one pipeline. They grow linearly with the number of micro-batches, so the plans of
        two numbers determine them."""
        one = self.world.times.one_f_one_b
        stages = min(stages, self.job.problem.model.count)
        first, second = one(stages, 2 * stages), one(stages, 2 * stages + 1)
        return first + (microbatches - 2 * stages) * (second - first)
