"""Finds the best pipelines x stages x micro-batches (D x P x M) for the expected machines.

    for found in best_shapes(job, there, costs, "rebalanced", capacity=80e9): found.job, found.rate

Layers and global batch stay the same, and a stage must fit into a machine. For each number of stages there are two
candidates. One uses all machines. The other uses the mean number of machines that are up; the rest are spares.
Every shape is simulated on the same machines.
"""

from __future__ import annotations

from dataclasses import dataclass

from .availability import HOUR, Availability
from .compare import compare
from .costs import Costs
from .job import Job
from .run import Outcome

PLANS = 8
"""Maximum number of plans for each shape. Few are enough, because shapes differ by more than the estimates' error."""
DEEPEST = 16
"""Maximum number of stages. More stages only add bubbles."""


@dataclass(frozen=True)
class Found:
    job: Job
    outcome: Outcome

    @property
    def rate(self) -> float:
        """Micro-batches per hour."""
        return HOUR * self.outcome.steps * self.job.total / self.outcome.seconds


def best_shapes(
    job: Job, there: Availability, costs: Costs, policy: str, *, capacity: float, seed: int = 0
) -> list[Found]:
    """The shapes, fastest first.

    capacity: bytes that a machine has for a worker's state, without activations

    Raises ValueError if a single layer does not fit, or if no number of stages fits.
    """
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
        raise ValueError(f"--capacity: with up to {DEEPEST} stages, no stage fits into a machine")
    return sorted(out)
