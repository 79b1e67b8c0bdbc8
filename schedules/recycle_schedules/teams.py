"""Large jobs, planned in teams: pipelines without a death behave alike, so one of them is planned and copied.

    plan = plan_in_teams(problem)      # None if the problem is small, or has no teams

Pipelines are divided into blocks of TEAM. A block without a death is as many copies of one planned pipeline. A block
with deaths plans alone: its own peers take over. A block that would be much slower than the whole job needs to be (two
deaths at one stage) first joins others. So a further death changes one block, and the plans of the others are still in
the cache. Nothing here grows with the number of pipelines; the arrays of all ops are made when they are first read.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from .bounds import lower_bound
from .compiled import LOOPS
from .draft import Draft, times
from .instance import Instance
from .ops import O, Worker
from .plans import OpArrays, Plan
from .policies import Choices
from .problem import Problem
from .tries import simulated, steady

TEAM = 20
"""Pipelines in a block: one death in it costs 1/19 more work for its peers, one in the whole job 1/(D - 1)."""
LARGE = 500_000
"""Ops from which on a job is planned in teams."""
SLOWER = 1.06
"""How far a block's lower bound may be above the job's."""

Team = tuple[int, ...]
"""Its pipelines."""


def plan_in_teams(problem: Problem) -> Plan | None:
    """The plan of a large whole step; None if it is small, a remainder, or if its workers differ in speed."""
    p = problem
    if p.remainder or p.speeds or p.pipelines < 2 * TEAM or 3 * p.stages * p.total < LARGE:
        return None
    bound = lower_bound(p)
    teams = divide(p, bound)
    return _Joined(p, lower_bound=bound, parts=[(team, *_planned(_part(p, team))) for team in teams])


def divide(p: Problem, bound: float) -> list[Team]:
    """Teams of pipelines: blocks with deaths, and for each number of micro-batches all clean pipelines as copies."""
    hit = {w.pipeline for w in p.dead}
    blocks = [tuple(range(d, min(d + TEAM, p.pipelines))) for d in range(0, p.pipelines, TEAM)]
    if len(blocks[-1]) < TEAM:
        blocks[-2:] = [blocks[-2] + blocks[-1]]
    clean = [b for b in blocks if not hit & set(b)]
    teams: list[Team] = []
    for block in blocks:
        if hit & set(block):
            while clean and not _fits(p, block, bound):
                block += clean.pop()
            teams.append(block)
    if not all(_alive(p, team) for team in teams):
        return [tuple(range(p.pipelines))]
    alike: dict[int, Team] = {}
    for d in sorted(d for block in clean for d in block):
        alike[p.counts[d]] = (*alike.get(p.counts[d], ()), d)
    return teams + list(alike.values())


def _alive(p: Problem, team: Team) -> bool:
    return all(any((d, s) not in p.dead for d in team) for s in range(p.stages))


def _fits(p: Problem, team: Team, bound: float) -> bool:
    return _alive(p, team) and _bound(_part(p, team)) <= SLOWER * bound


_bound = lru_cache(maxsize=256)(lower_bound)


def _part(p: Problem, team: tuple[int, ...]) -> Problem:
    """The problem of a team: its pipelines renumbered from 0. A team without deaths is planned as one pipeline."""
    if not any(w.pipeline in team for w in p.dead):
        team = team[:1]
    number = {d: k for k, d in enumerate(team)}
    memory = p.memory_limit
    if isinstance(memory, dict) and "per_worker" in memory:
        mine = {
            f"{number[d]},{s}": p.limit(Worker(d, s))
            for d in team
            for s in range(p.stages)
            if p.limit(Worker(d, s)) < np.inf
        }
        memory = {"per_worker": mine, "default": None}
    return p.replace(
        pipelines=len(team),
        microbatches=tuple(p.counts[d] for d in team),
        failed=[(number[w.pipeline], w.stage) for w in sorted(p.dead) if w.pipeline in number],
        memory_limit=memory,
        name=None,
    )


@lru_cache(maxsize=64)
def _planned(part: Problem) -> tuple[Instance, Draft, np.ndarray]:
    """The draft of a team, by one policy, and the ends of its stages. All ops start early, so that the windows of a
    stage in different teams lie alike."""
    x = Instance.of(part)
    choices = Choices.of(x, turns=1)
    row = 0 if (x.cap < part.total).any() else 1
    *_, codes, starts = simulated(x, choices, choices.table(2)[row : row + 1], 0, late=False)
    draft = Draft(codes, starts, choices.hosts[0])
    return x, draft, times(x, draft)[0]


class _Joined(Plan):
    """The plans of all teams side by side, with the optimizer steps of the whole job."""

    _parts: list[tuple[Team, Instance, Draft, np.ndarray]]

    def __init__(
        self,
        problem: Problem,
        arrays: OpArrays | None = None,
        lower_bound: float = 0.0,
        time_unit: str = "slots",
        parts: Any = (),
    ) -> None:
        given = {"problem": problem, "lower_bound": lower_bound, "time_unit": time_unit, "_parts": parts}
        self.__dict__.update(given if arrays is None else given | {"arrays": arrays})

    @cached_property
    def _ends(self) -> np.ndarray:
        """(P,) ticks: end of each stage's last gradient over all teams."""
        return np.max([ends for *_, ends in self._parts], axis=0)

    @cached_property
    def _starts(self) -> list[np.ndarray]:
        """Starts of each part's ops; of a repeated step as late as the ends of the job's stages allow."""
        return [_late(x, draft, self._ends) if steady(x) else draft.starts for _, x, draft, _ in self._parts]

    @cached_property
    def arrays(self) -> OpArrays:  # type: ignore[override]
        """All ops: every part as often as its team has copies of it."""
        p, P = self.problem, self.problem.stages
        copies = [len(team) // x.problem.pipelines for team, x, *_ in self._parts]
        size = sum(len(part[2].codes) * copy for part, copy in zip(self._parts, copies, strict=True))
        live = p.workers() if p.optimizer != "none" else []
        types = (np.uint8, np.int32, np.int16, np.int16, np.float64, np.float64)
        out = OpArrays(*(np.empty(size + len(live), dtype=t) for t in types))
        first, at = p.first.astype(np.int32), 0
        for (team, x, draft, _), copy, starts in zip(self._parts, copies, self._starts, strict=True):
            kind, node = draft.codes & 3, draft.codes >> 2
            g, host = node // P, draft.host[node]
            pipes = np.array(team, dtype=np.int16).reshape(copy, -1)  # (copies, pipelines of the part)
            columns = (
                kind,
                first[pipes][:, x.pipeline[g]] + x.index[g],
                node % P,
                pipes[:, host // P],
                starts / x.ticks,
                (starts + x.duration[kind, host]) / x.ticks,
            )
            for name, column in zip(OpArrays.__dataclass_fields__, columns, strict=True):
                getattr(out, name)[at : at + len(kind) * copy].reshape(copy, -1)[:] = column
            at += len(kind) * copy
        if live:
            self._add_steps(out, at)
        return out

    def _add_steps(self, out: OpArrays, at: int) -> None:
        p = self.problem
        ready = self._ends / self._parts[0][1].ticks + np.array(p.per_stage("allreduce"))
        if p.optimizer == "barrier":
            ready = np.full(p.stages, ready.max())
        pipeline, stage = np.array(p.workers()).T
        out.kind[at:], out.microbatch[at:], out.stage[at:], out.pipeline[at:] = O, -1, stage, pipeline
        out.start[at:] = ready[stage]
        out.end[at:] = ready[stage] + np.array(p.per_stage("O"))[stage]


def _late(x: Instance, draft: Draft, ends: np.ndarray) -> np.ndarray:
    starts = np.empty_like(draft.starts)
    LOOPS.latest(
        x.stages, draft.host, x.todo, x.sent, x.duration, x.send, x.send_rerouted, draft.codes,
        np.arange(len(draft.codes)), len(draft.codes), np.tile(ends, x.problem.pipelines), starts,
    )  # fmt: skip
    return starts
