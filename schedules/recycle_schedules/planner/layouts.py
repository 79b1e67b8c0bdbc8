"""plan_layout(problem), for problems with layers: the plan also chooses the stage boundaries.

    best = plan_layout(problem)               # best.layout, best.problem with the durations of its stages
    best = plan_layout(problem, seconds=1.0)  # keeps searching
    plan_rerouted(problem).value              # for comparison: with the boundaries of the fault-free job

Only a plan shows how good a layout is. Equal loads leave no slack to fill the pipeline, and memory limits and
re-routing weigh differently at every stage. So the search has three parts:

1. The bounds (`bounds/layout_bound.py`) propose the most even layouts, for several measures of evenness.
2. *Climbing* plans the neighbours of the best layout, those with the least bound first. A neighbour moves one layer
   from one stage to another. A layout whose bound is not below the best plan's value is never planned.
3. *Refining* continues local search on the plans of the best layouts in turn. A neighbouring layout can keep a plan's
   order of ops. So each improved plan is retimed with all neighbouring layouts, which is a thousand times cheaper than
   planning them.

The amount of work before the first result depends on the size of the job, so that this result always takes well
under a second. Large jobs are planned for a few even layouts only.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ..bounds import LayoutBounds, lower_bound
from ..compiled import LOOPS
from ..layers import Layout
from ..op_kinds import COMPUTE, OpKind
from ..plans import Plan
from ..problem import Problem
from .block_decomposition import plan_in_blocks
from .candidates import improved, retimed
from .instance import Instance
from .partial_schedule import PartialSchedule, finish, value
from .planner import plan, plans
from .search import MOVED

EVEN = ((1.0, 2.0, 0.1), (1.0, 2.0, 0.5), (1.03, 8.0, 0.3), (1.03, 1.0, 0.1))
"""Measures of evenness: arguments (slack, power, tilt) of `LayoutBounds.layout`."""
ARMS = 6
"""Number of best layouts that are refined in turn."""
RUNS = ((0.2, 1.0), (0.5, 8.0), (0.2, 1.0), (0.1, 8.0))
LEAN = (0.5, 0.0, 1.0)
"""Arguments of `candidates.improved` for successive runs of local search. RUNS: (heat, weight). LEAN: lean."""


def plan_layout(problem: Problem, *, seconds: float = 0.0) -> Plan:
    """The best plan found over all layouts.

    The plan's `layout` is the number of layers of each stage. Its `problem` has the resulting durations and memory
    limits. Its `gap` is relative to a bound over all layouts.

    problem: must have `layers`.
    seconds: time to search after the first result. The search ends early at a provable optimum.

    Raises ValueError if the problem has no layers, or if they do not fit into `capacity_bytes`. A pure function if
    `seconds` is 0. Safe to call from any thread. The compiled loops release the GIL."""
    until = time.perf_counter() + seconds
    for best in layout_plans(problem):  # noqa: B007  (only the last one is used)
        if time.perf_counter() >= until:
            break
    return best()


def plan_rerouted(problem: Problem, *, seconds: float = 0.0) -> Plan:
    """The best plan found by re-routing alone, with the layout of the fault-free job.

    Arguments and errors as for `plan_layout`. The lower bound covers this layout only."""
    layout = plan_layout(problem.replace(failed=())).layout
    assert layout is not None
    return _of_layout(plan(problem.with_layout(layout), seconds=seconds), layout)


def layout_plans(problem: Problem) -> Iterator[Callable[[], Plan]]:
    """Yield the best result so far after each slice of the search. Ends at a provable optimum, or for a large job after
    its last layout.

    Call a result to get its Plan."""
    search = _Search(problem)
    for _ in range(search.steps_at_once):
        if not search.step():
            break
    yield search.result
    while search.step():
        yield search.result


@dataclass
class _Arm:
    """A layout and its best plan so far. value: `Plan.value` of this plan, in the problem's unit of time."""

    layout: Layout
    problem: Problem
    value: float
    instance: Instance | None = None
    goal: int = 0  # lower bound for this layout, in ticks
    schedule: PartialSchedule | None = None
    whole: Plan | None = None  # the plan of a job planned in blocks


class _Search:
    """The state of the search: the arms, and the steps that improve them."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.bounds = problem, LayoutBounds(problem)
        self.target = self.bounds.best * (1 + 1e-9)
        self.arms: dict[Layout, _Arm] = {}
        self.instances: dict[Layout, tuple[Problem, Instance, int]] = {}
        self.planned: set[Layout] = set()
        self.refined = 0
        self.size = 3 * problem.stages * problem.total or 1
        self.first = self._even()
        self.best = self.plan(next(self.first))

    @property
    def steps_at_once(self) -> int:
        """Number of steps before the first result."""
        return max(1, min(40, int(800 / math.sqrt(self.size))))

    def step(self) -> bool:
        """Plan or refine one layout. Return False if the search is complete."""
        if self.best.value <= self.target:
            return False
        even = next((layout for layout in self.first if layout not in self.planned), None)
        if even is not None:
            self.plan(even)
        elif not (self.refined < len(self.planned) and self.refine()) and not self.climb() and not self.refine():
            return False
        self.best = min(self.arms.values(), key=lambda arm: arm.value)
        return True

    def result(self) -> Plan:
        arm = self.best
        if arm.whole is None:
            assert arm.instance is not None and arm.schedule is not None
            found = finish(arm.instance, arm.schedule, 0.0)
        else:
            found = copy.copy(arm.whole)
        found.__dict__["lower_bound"] = self.bounds.best
        return _of_layout(found, arm.layout)

    def _even(self) -> Iterator[Layout]:
        """The layouts to plan first."""
        yield self.bounds.layout()
        if self.bounds.of(self.bounds.in_proportion) < math.inf:
            yield self.bounds.in_proportion
        yield from (self.bounds.layout(*even) for even in EVEN)

    # ---- steps

    def plan(self, layout: Layout) -> _Arm:
        """Plan a layout from scratch and add its arm."""
        self.planned.add(layout)
        problem = self.problem.with_layout(layout)
        whole = plan_in_blocks(problem)
        if whole is not None:
            arm = _Arm(layout, problem, whole.value, whole=whole)
        else:
            found = next(plans(problem))
            x, schedule = found.instance, found.schedule
            arm = _Arm(layout, problem, value(x, schedule) / x.ticks, x, round(found.bound * x.ticks) + 1, schedule)
        self._take(arm)
        return arm

    def climb(self) -> bool:
        """Consider the best layout and its neighbours, and plan the unplanned one with the least bound. Return False if
        none of them can be better than the best plan."""
        found = [
            (bound, sum(s * n for s, n in enumerate(layout)), layout)
            for layout in (self.best.layout, *_neighbours(self.best.layout))
            if layout not in self.planned and (bound := self.bounds.of(layout)) < self.best.value * (1 - 1e-9)
        ]
        if not found:
            return False
        self.plan(min(found)[2])
        return True

    def refine(self) -> bool:
        """Run local search on the plan of one of the best layouts. Return False if the job is too large, or the loops
        are not compiled."""
        if self.size >= MOVED or not LOOPS.compiled:
            return False
        arms = sorted(self.arms.values(), key=lambda arm: arm.value)[:ARMS]
        seed, self.refined = self.refined, self.refined + 1
        turn, arm = seed // len(arms), arms[seed % len(arms)]
        heat, weight = RUNS[turn % len(RUNS)]
        x, lean = arm.instance, LEAN[turn % len(LEAN)]
        assert x is not None and arm.schedule is not None
        effort = max(50, min(20 * self.size, 2_000_000 // self.size, 500 << min(turn, 10)))
        schedule = improved(x, arm.schedule, arm.goal, effort, seed, heat, lean, weight)
        better = value(x, schedule) / x.ticks < arm.value
        arm.schedule, arm.value = schedule, value(x, schedule) / x.ticks
        if better or turn == 0:
            self._carry_over(arm)
        return True

    def _carry_over(self, arm: _Arm) -> None:
        """Retime the arm's order of ops with the neighbouring layouts."""
        assert arm.schedule is not None
        for layout in _neighbours(arm.layout):
            if self.bounds.of(layout) >= self.best.value:
                continue
            if layout not in self.instances:
                problem = self.problem.with_layout(layout)
                x = Instance.of(problem)
                self.instances[layout] = problem, x, round(lower_bound(problem) * x.ticks) + 1
            problem, x, goal = self.instances[layout]
            if _fits(x, arm.schedule):
                schedule = retimed(x, arm.schedule)
                self._take(_Arm(layout, problem, value(x, schedule) / x.ticks, x, goal, schedule))

    def _take(self, arm: _Arm) -> None:
        known = self.arms.get(arm.layout)
        if known is None or arm.value < known.value:
            self.arms[arm.layout] = arm


def _of_layout(found: Plan, layout: Layout) -> Plan:
    """Set the layout of a plan in place, so that a subclass of Plan keeps its type. This is safe, because no other code
    has the plan yet."""
    found.__dict__["layout"] = layout
    return found


def _neighbours(layout: Layout) -> Iterator[Layout]:
    """All layouts that move one layer from one stage to another."""
    for a, n in enumerate(layout):
        for b in range(len(layout)):
            if a != b and n > 1:
                moved = list(layout)
                moved[a] -= 1
                moved[b] += 1
                yield tuple(moved)


def _fits(x: Instance, schedule: PartialSchedule) -> bool:
    """Whether the schedule's order of ops stays within this instance's memory limits. These limits may be lower than
    those of the layout for which the schedule was made."""
    if np.isinf(x.cap).all():
        return True
    share = x.problem.i_release
    code, worker = schedule.codes & 3, schedule.host[schedule.codes >> 2]
    change = np.array([(kind is OpKind.FORWARD) - kind.frees(share) for kind in COMPUTE])[code]
    order = np.argsort(worker, kind="stable")
    level = np.cumsum(change[order])  # each worker's changes sum to 0, so workers do not mix
    return bool((level <= x.cap[worker[order]] + 1e-6).all())
