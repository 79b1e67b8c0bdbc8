"""Plans and action lists prepared for the possible next deaths.

    store = PlanStore(forwards=2)
    for problem in store.ahead(current):         # while idle
        store.plan(problem)
    plan, lists, validation = store.plan(after)  # looked up if this death was prepared, else planned now

Equal pipelines are interchangeable: a plan for one death also serves the same death in any other pipeline. A uniform
job therefore needs about one plan per stage. Not thread-safe.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from ..actions import Actions, actions
from ..ops import Worker
from ..plans import OpArrays, Plan
from ..problem import Problem
from .planner import plan as make_plan

MOST_PLANS = 128
"""Limit on stored plans. Memberships and durations keep changing while a job runs. If plans are small (about 100 KB for
12 workers), the byte limit alone would let the coordinator grow by 15 KB per death for more than 10,000 deaths."""


class Prepared(NamedTuple):
    """A plan with every worker's action lists for a step and for a validation pass."""

    plan: Plan
    actions: Actions
    validation: Actions

    @property
    def size(self) -> int:
        """Bytes of all arrays."""
        columns = (getattr(self.plan.arrays, name) for name in OpArrays.__dataclass_fields__)
        return sum(column.nbytes for column in columns) + self.actions.size + self.validation.size


class PlanStore:
    """An LRU cache: problem -> plan and action lists. Holds at most MOST_PLANS plans.

    forwards: micro-batches of each pipeline in a validation pass.
    most_bytes: byte limit of the cache. The plan stored last stays even if it alone exceeds the limit.
    planner: the function that plans a problem."""

    def __init__(
        self, forwards: int = 0, most_bytes: int = 1 << 29, planner: Callable[[Problem], Plan] = make_plan
    ) -> None:
        self._forwards, self._most, self._planner = forwards, most_bytes, planner
        self._made: OrderedDict[Problem, Prepared] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._made)

    def plan(self, problem: Problem) -> Prepared:
        """The plan and action lists of a problem.

        Reuses a stored plan if its problem differs only in the order of the pipelines. Otherwise plans the problem and
        stores the plan. Plans of remainders are never stored."""
        if problem.remainder:
            return self._make(problem)
        known, names = canonical(problem)
        if known in self._made:
            self._made.move_to_end(known)
        else:
            self._keep(known, self._make(known))
        return _renamed(self._made[known], problem, names)

    def ahead(self, problem: Problem) -> Iterator[Problem]:
        """Yield the problems after possible next deaths, most likely deaths first. Skips problems with a stored plan.

        A death takes one worker or, if hosts are known, all workers of one host. The iterator stops when the store has
        no room for more. New plans may evict plans of other memberships, but neither each other nor the plan of
        `problem`."""
        room, size = self._most, 0
        for count, after in enumerate(chain([canonical(problem)[0]], _after_next_deaths(problem))):
            if room < size or count == MOST_PLANS:
                return
            if after not in self._made and count > 0:
                yield after
            if after in self._made:
                self._made.move_to_end(after)
                size = self._made[after].size
                room -= size

    def _make(self, problem: Problem) -> Prepared:
        plan = self._planner(problem)
        return Prepared(plan, actions(plan), actions(plan, forwards=self._forwards))

    def _keep(self, problem: Problem, made: Prepared) -> None:
        self._made[problem] = made
        self._bytes += made.size
        while (self._bytes > self._most or len(self._made) > MOST_PLANS) and len(self._made) > 1:
            self._bytes -= self._made.popitem(last=False)[1].size


def canonical(problem: Problem) -> tuple[Problem, list[int]]:
    """Returns (canonical problem, names): the problem with its pipelines sorted by their dead stages. Pipeline k of it
    is pipeline names[k] of the argument. The problem is unchanged if pipelines differ in more than deaths."""
    stages = _dead_stages(problem)
    names = list(range(problem.pipelines))
    if _alike(problem):
        names.sort(key=lambda d: (stages[d], d))
    if names == sorted(names):
        return problem, names
    return problem.replace(failed=[(k, s) for k, d in enumerate(names) for s in stages[d]]), names


def _alike(p: Problem) -> bool:
    """Whether pipelines differ only in their deaths."""
    return len(set(p.counts)) == 1 and not p.speeds and p.limits_alike and p.graph.uniform


def _dead_stages(p: Problem) -> list[tuple[int, ...]]:
    stages: list[tuple[int, ...]] = [()] * p.pipelines
    for w in sorted(p.dead):
        stages[w.pipeline] += (w.stage,)
    return stages


def _after_next_deaths(problem: Problem) -> Iterator[Problem]:
    for dead in _next_deaths(problem):
        try:
            after, _ = canonical(problem.replace(failed=[*problem.dead, *dead]))
        except ValueError:  # a stage would have no live worker
            continue
        yield after


def _next_deaths(p: Problem) -> Iterable[tuple[Worker, ...]]:
    """One death for each kind of pipeline and stage, sorted by the number of workers of that kind, largest first. Then
    the loss of each host."""
    stages = _dead_stages(p)
    alike = _alike(p)

    def kind(w: Worker) -> tuple[int, Any]:
        return w.stage, stages[w.pipeline] if alike else w.pipeline

    live = p.workers()
    first = {kind(w): w for w in reversed(live)}
    for found, _ in Counter(map(kind, live)).most_common():
        yield (first[found],)
    if p.graph.links is not None:
        hosts = p.graph.links.hosts
        for host in sorted({hosts[w.pipeline][w.stage] for w in live}):
            yield tuple(w for w in live if hosts[w.pipeline][w.stage] == host)


def _renamed(made: Prepared, problem: Problem, names: list[int]) -> Prepared:
    """`made` as the plan of `problem`: pipeline k of `made` becomes pipeline names[k]."""
    if names == sorted(names):
        return made
    name, a, each = np.array(names), made.plan.arrays, problem.counts[0]
    microbatch = np.where(a.microbatch < 0, -1, name[a.microbatch // max(each, 1)] * each + a.microbatch % max(each, 1))
    arrays = replace(a, microbatch=microbatch.astype(np.int32), pipeline=name[a.pipeline].astype(np.int16))
    plan = replace(made.plan, problem=problem, arrays=arrays)
    return Prepared(plan, made.actions.renamed(names), made.validation.renamed(names))
