"""plan(problem), the planner's public function.

    best = plan(problem)                  # good, in milliseconds
    best = plan(problem, seconds=1.0)     # keeps searching until it is provably optimal or the time is over

A pure function: the same problem gives the same plan (with `seconds`, as far as the clock lets it search).
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
    """The best plan found; `plan.gap` says how far it may be from the optimum.

    seconds: time to search beyond the first plan; it ends early at a provable optimum. May be called from any
    thread; the compiled loops release the GIL."""
    until = time.perf_counter() + seconds
    quick = plan_in_blocks(problem)
    if quick is not None and seconds == 0:
        return quick
    for best in plans(problem):  # noqa: B007  (the last one is wanted)
        if time.perf_counter() >= until:
            break
    found = best()
    return found if quick is None or found.value <= quick.value else quick


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan of a schedule, made when it is called."""

    instance: Instance
    schedule: PartialSchedule
    bound: float

    def __call__(self) -> Plan:
        return finish(self.instance, self.schedule, self.bound)


def plans(problem: Problem) -> Iterator[Candidate]:
    """The best plan so far, again and again, each time after more work; ends at a provable optimum. Call one for its
    Plan."""
    x = Instance.of(problem)
    bound = lower_bound(problem)
    target = round(bound * x.ticks) + 1
    for schedule in search(x, target, _ignoring_links(x)):
        yield Candidate(x, schedule, bound)


def _ignoring_links(x: Instance) -> PartialSchedule | None:
    """The initial schedule of the same problem without its links, at the times that it takes with them; None if the
    problem has no links. As a candidate it makes sure that looking at links is never worse than ignoring them."""
    if x.problem.graph.uniform:
        return None
    problem = x.problem.replace(links=None)
    plain = Instance.of(problem)
    return retimed(x, next(search(plain, round(lower_bound(problem) * plain.ticks) + 1)))


if load(timeout=1.0):  # from the cache on disk; a first compile goes on in the background
    plan(Problem(pipelines=2, stages=2, microbatches=2, optimizer="none"))  # a first call takes longest
