"""Which D x P x M suits the machines that are to be expected.

for found in best_shapes(job, there, costs, "rebalanced", capacity=80e9): found.job, found.rate

The layers and the global batch stay; a stage must fit into a machine; pipelines are as many as the machines make, all
of them or those that are there on average, so that the others stand by. Every shape is simulated on the same machines.
"""

from __future__ import annotations

from dataclasses import dataclass

from .availability import HOUR, Availability
from .compare import compare
from .costs import Costs
from .job import Job
from .run import Outcome

PLANS = 8
"""Of each shape: what tells two shapes apart is more than an estimate is off."""
DEEPEST = 16
"""Stages; more have only more bubbles."""


@dataclass(frozen=True)
class Found:
    job: Job
    outcome: Outcome

    @property
    def rate(self) -> float:
        """Micro-batches an hour."""
        return HOUR * self.outcome.steps * self.job.total / self.outcome.seconds


def best_shapes(
    job: Job, there: Availability, costs: Costs, policy: str, *, capacity: float, seed: int = 0
) -> list[Found]:
    """The shapes, the fastest first. capacity: bytes of a machine, for a worker's state (not for what
    is in flight). ValueError if not even a single layer fits."""
    found = []
    for pipelines, stages in _candidates(job, there, capacity):
        shape = job.reshaped(pipelines, stages)
        outcome = compare(shape, there, costs, [policy], seed=seed, plans=PLANS).outcomes[policy]
        found.append(Found(shape, outcome))
    return sorted(found, key=lambda one: -one.rate)


def _candidates(job: Job, there: Availability, capacity: float) -> list[tuple[int, int]]:
    if max(job.layer_bytes) > capacity:
        raise ValueError("--capacity: a single layer does not fit into a machine")
    out = set()
    for stages in range(1, min(DEEPEST, len(job.layer_bytes), there.machines) + 1):
        if job.reshaped(1, stages).state_bytes(job.reshaped(1, stages).layout) <= capacity:
            out |= {(min(job.total, max(1, int(n // stages))), stages) for n in (there.machines, there.mean)}
    if not out:
        raise ValueError("--capacity: no number of stages up to 16 makes a stage fit into a machine")
    return sorted(out)
