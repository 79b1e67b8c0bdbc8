"""Simulates all policies on the same machines.

result = compare(job, there, costs, NAMES, seed=1)
result.outcomes["rebalanced"].relative, result.times.covered
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .availability import Availability
from .broken_step import BrokenSteps
from .costs import Costs
from .job import Job
from .policies import World, policies
from .run import Outcome, Run
from .step_times import Key, StepTimes


@dataclass(frozen=True)
class Comparison:
    job: Job
    there: Availability
    costs: Costs
    times: StepTimes
    outcomes: dict[str, Outcome]


def compare(
    job: Job, there: Availability, costs: Costs, names: Sequence[str], *, seed: int = 0, plans: int = 64
) -> Comparison:
    """Returns the outcome of each policy.

    names  policies to simulate
    seed   seed of the random choices of policies
    plans  maximum number of memberships to plan; those that last longest are planned"""
    times = StepTimes(job, plans)
    world = World(times, costs, there.seconds / max(1, there.losses), seed)
    broken = BrokenSteps(times)

    def best(name: str) -> Outcome:
        found = [Run(there, job, times.reference).play(policy) for policy in policies(name, world, there, broken)]
        return max(found, key=lambda outcome: outcome.steps)

    spent: Counter[Key] = Counter()
    for name in names:
        if name.startswith(("recycle", "rerouted", "rebalanced", "respawned")):  # policies that use plans
            spent.update(best(name).spent)
    times.plan(spent)
    broken.forget()
    return Comparison(job, there, costs, times, {name: best(name) for name in names})
