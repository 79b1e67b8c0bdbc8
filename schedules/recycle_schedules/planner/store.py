"""Plans and action lists made ahead, for the deaths that may come next.

    store = PlanStore(forwards=2)
    for problem in store.ahead(present):         # while nothing else is to do
        store.plan(problem)
    plan, lists, validation = store.plan(after)  # at once if that death was planned ahead, else made now

Pipelines that are alike may change names: a plan for one death is a plan for the same death in any other pipeline, so a
uniform job needs about one plan for each stage. Not thread-safe: one thread at a time.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..actions import Actions, actions
from ..ops import Worker
from ..plans import OpArrays, Plan
from ..problem import Problem
from .planner import plan as make_plan

# Memberships and durations are other ones for as long as a job runs: where plans are small (some 100 KB for 12 workers)
# the bytes alone let its coordinator grow by 15 KB a death, for 10,000 deaths and more.
MOST_PLANS = 128


class Prepared(NamedTuple):
    """A plan, every worker's list for a step, and for a validation pass."""

    plan: Plan
    actions: Actions
    validation: Actions

    @property
    def size(self) -> int:
        """Bytes of the arrays."""
        columns = (getattr(self.plan.arrays, name) for name in OpArrays.__dataclass_fields__)
        return sum(column.nbytes for column in columns) + self.actions.size + self.validation.size


class PlanStore:
    """What has been planned, least recently used first out: MOST_PLANS at most.

    forwards: micro-batches of each pipeline in a validation pass.
    most_bytes: of all that is kept, but for the newest."""

    def __init__(
        self, forwards: int = 0, most_bytes: int = 1 << 29, planner: Callable[[Problem], Plan] = make_plan
    ) -> None:
        self._forwards, self._most, self._planner = forwards, most_bytes, planner
        self._made: OrderedDict[Problem, Prepared] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._made)

    def plan(self, problem: Problem) -> Prepared:
        """The plan of a problem, from memory if an equal one (but for the names of its pipelines) was planned before;
        else it is made and kept. What is left of a broken step is never kept."""
        if problem.remainder:
            return self._make(problem)
        known, names = canonical(problem)
        if known in self._made:
            self._made.move_to_end(known)
        else:
            self._keep(known, self._make(known))
        return _renamed(self._made[known], problem, names)

    def ahead(self, problem: Problem) -> Iterator[Problem]:
        """The problems of the next deaths that are not planned yet, those first that most deaths lead to: every single
        worker, and every host with all its workers where hosts are known. It may end before all are kept: they push
        out what other memberships led to, but neither one another nor the plan of this problem."""
        room, size = self._most, 0
        for count, after in enumerate((canonical(problem)[0], *_afterwards(problem))):
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
    """The problem with its pipelines in the order of their dead stages, and their names: pipeline k of it is pipeline
    names[k]. The problem itself where pipelines differ in more than deaths."""
    stages = _dead_stages(problem)
    names = list(range(problem.pipelines))
    if _alike(problem):
        names.sort(key=lambda d: (stages[d], d))
    if names == sorted(names):
        return problem, names
    return problem.replace(failed=[(k, s) for k, d in enumerate(names) for s in stages[d]]), names


def _alike(p: Problem) -> bool:
    """Do pipelines differ in nothing but deaths?"""
    return len(set(p.counts)) == 1 and not p.speeds and p.limits_alike and p.graph.uniform


def _dead_stages(p: Problem) -> list[tuple[int, ...]]:
    stages: list[tuple[int, ...]] = [()] * p.pipelines
    for w in sorted(p.dead):
        stages[w.pipeline] += (w.stage,)
    return stages


def _afterwards(problem: Problem) -> Iterator[Problem]:
    for dead in _next_deaths(problem):
        try:
            after, _ = canonical(problem.replace(failed=[*problem.dead, *dead]))
        except ValueError:  # nobody would be left at a stage
            continue
        yield after


def _next_deaths(p: Problem) -> Iterable[tuple[Worker, ...]]:
    """One death for each kind of pipeline and stage, those that stand for most workers first."""
    stages, alike = _dead_stages(p), _alike(p)
    kind = lambda w: (w.stage, stages[w.pipeline] if alike else w.pipeline)  # noqa: E731
    live = p.workers()
    first = {kind(w): w for w in reversed(live)}
    for found, _ in Counter(map(kind, live)).most_common():
        yield (first[found],)
    if p.graph.links is not None:
        hosts = p.graph.links.hosts
        for host in sorted({hosts[w.pipeline][w.stage] for w in live}):
            yield tuple(w for w in live if hosts[w.pipeline][w.stage] == host)


def _renamed(made: Prepared, problem: Problem, names: list[int]) -> Prepared:
    """The same with pipeline k called names[k], as the plan of `problem`."""
    if names == sorted(names):
        return made
    name, a, each = np.array(names), made.plan.arrays, problem.counts[0]
    microbatch = np.where(a.microbatch < 0, -1, name[a.microbatch // max(each, 1)] * each + a.microbatch % max(each, 1))
    arrays = replace(a, microbatch=microbatch.astype(np.int32), pipeline=name[a.pipeline].astype(np.int16))
    plan = replace(made.plan, problem=problem, arrays=arrays)
    return Prepared(plan, made.actions.renamed(names), made.validation.renamed(names))
