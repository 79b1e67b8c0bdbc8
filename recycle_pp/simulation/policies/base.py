"""The common base of all policies."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from ..costs import Costs
from ..job import Job
from ..run import Run
from ..step_times import StepTimes


@dataclass(eq=False)
class World:
    """The information available to a policy: durations of steps, costs, and the true mean seconds between losses.

    `between_losses` is for the choice of a checkpoint interval.
    """

    times: StepTimes
    costs: Costs
    between_losses: float
    seed: int = 0


@dataclass(eq=False)
class Base:
    """A policy that ignores changes."""

    world: World
    name: str = ""
    run: Run = field(init=False, repr=False)

    def begin(self, run: Run) -> None:
        self.run = run
        self.rng = random.Random(f"{self.name} {self.world.seed}")

    def lost(self, machine: int) -> None: ...

    def gained(self, machine: int) -> None: ...

    @property
    def job(self) -> Job:
        return self.world.times.job

    @property
    def costs(self) -> Costs:
        return self.world.costs

    def usual_step(self, pipelines: int) -> float:
        """Seconds of a 1F1B step with the same number of micro-batches on `pipelines` whole pipelines."""
        return self.world.times.one_f_one_b(self.job.stages, math.ceil(self.job.total / pipelines))
