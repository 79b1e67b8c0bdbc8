"""Plans made ahead, kept on disk, found in microseconds.

    store = PlanStore("plans/", problem)
    store.fill(failures=2)               # plans for f = 1..2 (as Failure Normalization would have them) and for every
                                         # single next death from the problem's present state
    store.find({Worker(1, 2)})           # the plan for exactly these dead workers, or None

Pipelines that are alike may change names: a plan for one death is a plan for the same death in any other pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..ops import Worker
from ..plans import OpArrays, Plan
from ..problem import Problem
from .normalize import stage_period
from .planner import plan as make_plan

Key = tuple[tuple[int, ...], ...]
"""The dead stages of each pipeline; for pipelines that are alike, sorted."""


class PlanStore:
    """The plans of one job in a folder, one file for each pattern of deaths."""

    def __init__(self, folder: str | Path, problem: Problem) -> None:
        if problem.remainder:
            raise ValueError("a store holds plans of whole steps, not of a remainder")
        self.problem = problem
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        limit = problem.memory_limit
        per_worker = isinstance(limit, dict) and "per_worker" in limit
        self.alike = len(set(problem.counts)) <= 1 and not problem.speeds and not per_worker
        self._plans: dict[Key, Plan] = {}
        for path in sorted(self.folder.glob("plan-*.json")):
            plan = Plan.load(path)
            if plan.problem.replace(failed=[]) == problem.replace(failed=[]):
                self._plans[self._key(plan.problem.dead)] = plan

    def __len__(self) -> int:
        return len(self._plans)

    def find(self, dead: Iterable[Worker]) -> Plan | None:
        """The plan for exactly these deaths, from memory."""
        dead = frozenset(dead)
        plan = self._plans.get(self._key(dead))
        if plan is None or plan.problem.dead == dead:
            return plan
        return _renamed(
            plan, self.problem.replace(failed=sorted(dead)), self._order(dead), self._order(plan.problem.dead)
        )

    def add(self, plan: Plan) -> None:
        """Keep a plan in memory and on disk."""
        key = self._key(plan.problem.dead)
        self._plans[key] = plan
        name = "+".join(str(w) for w in sorted(plan.problem.dead)) or "none"
        path = self.folder / f"plan-{name}.json"
        plan.save(path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)

    def fill(
        self, failures: int, seconds: float = 0.0, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> None:
        """Plan what may come and is not there yet: f = 1..failures deaths spread as well as possible, and every single
        death after the present ones. seconds: search time of each plan."""
        wanted = [self._spread(f) for f in range(1, failures + 1)]
        wanted += [self.problem.dead | {w} for w in self.problem.workers() if len(self.problem.live[w.stage]) > 1]
        missing = {self._key(dead): dead for dead in wanted if self._key(dead) not in self._plans}
        for k, dead in enumerate(missing.values()):
            self.add(make_plan(self.problem.replace(failed=sorted(dead)), seconds=seconds))
            progress(k + 1, len(missing))

    def _spread(self, failures: int) -> frozenset[Worker]:
        """The best places for so many deaths: each where the stage's period stays least, in a pipeline of its own."""
        p = self.problem
        deaths = [0] * p.stages
        for _ in range(failures):
            open_ = [s for s in range(p.stages) if deaths[s] < p.pipelines - 1]
            if not open_:
                raise ValueError(f"failures: {failures} deaths leave a stage without a worker")
            deaths[min(open_, key=lambda s: (stage_period(p, s, deaths[s] + 1), s))] += 1
        places = [s for s in range(p.stages) for _ in range(deaths[s])]
        return frozenset(Worker(k % p.pipelines, s) for k, s in enumerate(places))

    def _key(self, dead: Iterable[Worker]) -> Key:
        pattern = _pattern(self.problem, dead)
        return tuple(sorted(pattern)) if self.alike else tuple(pattern)

    def _order(self, dead: Iterable[Worker]) -> list[int]:
        """Pipelines sorted by their dead stages: equal patterns take equal places."""
        pattern = _pattern(self.problem, dead)
        return sorted(range(len(pattern)), key=lambda d: (pattern[d], d))


def _pattern(p: Problem, dead: Iterable[Worker]) -> list[tuple[int, ...]]:
    stages: list[list[int]] = [[] for _ in range(p.pipelines)]
    for w in sorted(dead):
        stages[w.pipeline].append(w.stage)
    return [tuple(s) for s in stages]


def _renamed(plan: Plan, problem: Problem, new: list[int], old: list[int]) -> Plan:
    """The plan with pipeline old[k] called new[k]."""
    name = np.empty(problem.pipelines, dtype=np.int64)
    name[old] = new
    a = plan.arrays
    first = problem.first
    has = a.microbatch >= 0
    g = np.where(has, a.microbatch, 0)
    home = np.searchsorted(first, g, side="right") - 1
    microbatch = np.where(has, first[name[home]] + g - first[home], -1).astype(np.int32)
    renamed = OpArrays(a.kind, microbatch, a.stage, name[a.pipeline].astype(np.int16), a.start, a.end)
    return replace(plan, problem=problem, arrays=renamed)
