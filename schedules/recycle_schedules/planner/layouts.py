"""plan_layout(problem), for problems that give layers: the boundaries between stages are part of the plan.

    best = plan_layout(problem)               # best.layout, best.problem with the durations of its stages
    best = plan_layout(problem, seconds=1.0)  # keeps searching
    plan_rerouted(problem).value              # with the boundaries of the job with nobody dead, for comparison

What makes a layout good is what the planner makes of it: loads that are equal leave nothing to fill the pipeline with,
and memory limits and re-routing weigh differently at every stage. So:

1. The bounds (`bounds/layout_bound.py`) name the most even layouts, for several ideas of even.
2. *Climbing*: layouts that differ from the best one by a layer that goes from one stage to another are planned, those
   with the least bound first. A layout whose bound is not below the best plan is never planned.
3. *Refining*: local search goes on from the plans of the best layouts in turn. Another layout can keep the order of ops
   of a plan: each plan that became better is timed with all neighbouring layouts, which is a thousand times cheaper
   than planning them.

How much of that is done before the first result depends on the size of the job, so that it takes well below a second
for any; large jobs are planned for a few even layouts only.
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
from ..plans import Plan
from ..problem import Problem
from .block_decomposition import plan_in_blocks
from .candidates import improved, retimed
from .instance import Instance
from .partial_schedule import PartialSchedule, finish, value
from .planner import plan, plans
from .search import MOVED

EVEN = ((1.0, 2.0, 0.1), (1.0, 2.0, 0.5), (1.03, 8.0, 0.3), (1.03, 1.0, 0.1))
"""Ideas of even: slack, power and tilt of `LayoutBounds.layout`."""
ARMS = 6
"""Layouts that are refined in turn."""
RUNS = ((0.2, 1.0), (0.5, 8.0), (0.2, 1.0), (0.1, 8.0))
LEAN = (0.5, 0.0, 1.0)
"""heat and weight, and lean, of runs of local search (`candidates.improved`)."""


def plan_layout(problem: Problem, *, seconds: float = 0.0) -> Plan:
    """The best plan found over all layouts; its `layout` says how many layers each stage has, its `problem` has the
    durations and memory limits that follow, and its `gap` is to a bound that no layout can beat.

    problem: one with `layers` (ValueError if not, or if the layers do not fit into `capacity_bytes`)
    seconds: time to search beyond the first result; it ends early at a provable optimum. A pure function otherwise. May
    be called from any thread; the compiled loops release the GIL."""
    until = time.perf_counter() + seconds
    for best in layout_plans(problem):  # noqa: B007  (the last one is wanted)
        if time.perf_counter() >= until:
            break
    return best()


def plan_rerouted(problem: Problem, *, seconds: float = 0.0) -> Plan:
    """What re-routing alone makes of the deaths: the best plan found of the layout that the job has with nobody dead.

    As `plan_layout` otherwise, except that the bound is of this layout alone."""
    layout = plan_layout(problem.replace(failed=())).layout
    assert layout is not None
    return _of_layout(plan(problem.with_layout(layout), seconds=seconds), layout)


def layout_plans(problem: Problem) -> Iterator[Callable[[], Plan]]:
    """The best plan so far, again and again, each time after more work; ends at a provable optimum, or with a large
    job's last layout. Call one for its Plan."""
    search = _Search(problem)
    for _ in range(search.steps_at_once):
        if not search.step():
            break
    yield search.result
    while search.step():
        yield search.result


@dataclass
class _Arm:
    """A layout and the best plan of it so far; value in the problem's unit."""

    layout: Layout
    problem: Problem
    value: float
    instance: Instance | None = None
    goal: int = 0  # ticks: its own lower bound
    schedule: PartialSchedule | None = None
    whole: Plan | None = None  # of a job that is planned in blocks


class _Search:
    """The arms, and the steps that make them better."""

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
        """So many steps are made before there is a result."""
        return max(1, min(40, int(800 / math.sqrt(self.size))))

    def step(self) -> bool:
        """Plan or refine one layout; False if there is nothing left to do."""
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
        """Layouts to begin with."""
        yield self.bounds.layout()
        if self.bounds.of(self.bounds.in_proportion) < math.inf:
            yield self.bounds.in_proportion
        yield from (self.bounds.layout(*even) for even in EVEN)

    # ---- steps

    def plan(self, layout: Layout) -> _Arm:
        """Plan a layout from nothing."""
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
        """Plan the neighbour of the best layout with the least bound; False if none can be better."""
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
        """Local search from one of the best layouts' plans; False for jobs too large for it."""
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
        """The order of a plan with the neighbouring layouts."""
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
    """The plan, which nobody else has seen, with its layout: whatever kind of Plan it is."""
    found.__dict__["layout"] = layout
    return found


def _neighbours(layout: Layout) -> Iterator[Layout]:
    """A layer from one stage to another: all boundaries between the two move by one."""
    for a, n in enumerate(layout):
        for b in range(len(layout)):
            if a != b and n > 1:
                moved = list(layout)
                moved[a] -= 1
                moved[b] += 1
                yield tuple(moved)


def _fits(x: Instance, schedule: PartialSchedule) -> bool:
    """Does the order keep to the memory limits? Those of another layout may be lower."""
    if np.isinf(x.cap).all():
        return True
    share = x.problem.i_release
    kind, worker = schedule.codes & 3, schedule.host[schedule.codes >> 2]
    change = np.array([1.0, -share, share - 1.0, -1.0])[kind]
    order = np.argsort(worker, kind="stable")
    level = np.cumsum(change[order])  # every worker ends with what it began with, so this is each worker's own level
    return bool((level <= x.cap[worker[order]] + 1e-6).all())
