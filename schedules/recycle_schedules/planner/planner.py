"""plan(problem), the planner's public function.

    best = plan(problem)                  # a good plan in milliseconds
    best = plan(problem, seconds=1.0)     # searches until the plan is provably optimal or the time is up

`plan` is a pure function: the same problem gives the same plan. With `seconds` the result also depends on how far the
search gets in that time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from ..bounds import lower_bound
from ..compiled import load
from ..plans import Plan
from ..problem import Problem
from .block_decomposition import plan_in_blocks
from .candidates import retimed
from .instance import Instance
from .partial_schedule import PartialSchedule, finish
from .search import search


def plan(problem: Problem, *, seconds: float = 0.0) -> Plan:
    """The best plan found. `Plan.gap` bounds its distance from the optimum.

    seconds: time to search after the first plan. The search ends early at a provable optimum.

    Safe to call from any thread. The compiled loops release the GIL."""
    until = time.perf_counter() + seconds
    quick = plan_in_blocks(problem)
    if quick is not None and seconds == 0:
        return quick
    for best in plans(problem):  # noqa: B007  (only the last one is used)
        if time.perf_counter() >= until:
            break
    found = best()
    return found if quick is None or found.value <= quick.value else quick


@dataclass(frozen=True, eq=False)
class Candidate:
    """A schedule. Calling it builds its Plan."""

    instance: Instance
    schedule: PartialSchedule
    bound: float

    def __call__(self) -> Plan:
        return finish(self.instance, self.schedule, self.bound)


def plans(problem: Problem) -> Iterator[Candidate]:
    """Yield the best candidate so far after each slice of the search. Ends at a provable optimum.

    Call a candidate to get its Plan."""
    x = Instance.of(problem)
    bound = lower_bound(problem)
    target = round(bound * x.ticks) + 1
    for schedule in search(x, target, _ignoring_links(x)):
        yield Candidate(x, schedule, bound)


def _ignoring_links(x: Instance) -> PartialSchedule | None:
    """The initial schedule of the problem without its links, retimed with them. None if the problem has no links.

    With this schedule as a candidate, planning with links is never worse than ignoring them."""
    if x.problem.graph.uniform:
        return None
    problem = x.problem.replace(links=None)
    plain = Instance.of(problem)
    return retimed(x, next(search(plain, round(lower_bound(problem) * plain.ticks) + 1)))


if load(timeout=1.0):  # true if loaded from the disk cache; a first compilation continues in the background
    plan(Problem(pipelines=2, stages=2, microbatches=2, optimizer="none"))  # warm up: the first call is the slowest
