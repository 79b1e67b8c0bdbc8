"""Plans of large jobs: blocks of pipelines are planned separately, and equal blocks only once.

    plan = plan_in_blocks(problem)      # None if the problem is too small or cannot be divided

Pipelines are divided into blocks of BLOCK. A block without deaths consists of copies of one planned pipeline. A block
with deaths re-routes within the block. If that would make the block much slower than the job (for example, after two
deaths at one stage), the block is first merged with others. After another death only one block is planned again. The
schedules of all other blocks come from a cache, so the work does not grow with the number of pipelines. New blocks are
planned at the same time, by one thread for each core. The arrays of all ops are built on first access.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from itertools import repeat
from typing import Any

import numpy as np

from ..bounds import lower_bound
from ..compiled import LOOPS
from ..compiled.timing import NEVER
from ..layers import Layout
from ..op_kinds import O, OpKind
from ..ops import Worker
from ..plans import OpArrays, Plan
from ..problem import Problem
from .candidates import simulated, steady
from .instance import Instance, ticks_per_unit
from .partial_schedule import PartialSchedule, times
from .policies import FOREIGN, Choices

BLOCK = 20
"""Pipelines per block. After a death, each peer in the block does 1/19 more work. It would be 1/(D - 1) if all D
pipelines shared the work."""
LARGE = 500_000
"""Minimum number of ops for planning in blocks."""
SLOWER = 1.06
"""Largest allowed ratio of a block's lower bound to the job's lower bound."""

Block = tuple[int, ...]
"""The pipelines of a block."""


def plan_in_blocks(problem: Problem) -> Plan | None:
    """The plan of a large whole step. None for small jobs, remainders, and workers with different speeds."""
    p = problem
    if p.remainder or p.speeds or p.pipelines < 2 * BLOCK or 3 * p.stages * p.total < LARGE:
        return None
    bound = lower_bound(p)
    blocks = divide(p, bound)
    parts = [_part(p, block) for block in blocks]
    distinct = dict.fromkeys(parts)
    ticks = min(map(ticks_per_unit, distinct))  # the same in all parts, because their times are compared
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:  # the compiled loops run without the GIL
        planned = dict(zip(distinct, threads.map(_planned, distinct, repeat(ticks)), strict=True))
    of_blocks = zip(blocks, parts, strict=True)
    return _BlockPlan(p, lower_bound=bound, parts=[(block, *planned[part]) for block, part in of_blocks])


def forget() -> None:
    """Drop all cached blocks, so that a bench can plan as a new process does."""
    _planned.cache_clear()
    _bound.cache_clear()


def divide(p: Problem, bound: float) -> list[Block]:
    """The blocks of pipelines: first those with deaths, then groups of equal pipelines without deaths (equal number of
    micro-batches, equal links and equal memory limits).

    bound: lower bound for the job."""
    hit = {w.pipeline for w in p.dead}
    blocks: list[Block] = []
    for zone in _by_zone(p):
        blocks += [tuple(zone[k : k + BLOCK]) for k in range(0, len(zone), BLOCK)]
        if len(blocks[-1]) < BLOCK:
            blocks[-2:] = [sum(blocks[-2:], ())]
    clean = [b for b in blocks if not hit & set(b)]
    found: list[Block] = []
    for block in blocks:
        if hit & set(block):
            while clean and not _fits(p, block, bound):
                block += clean.pop()
            found.append(block)
    if not all(_alive(p, block) for block in found):
        return [tuple(range(p.pipelines))]
    alike: dict[object, Block] = {}
    for d in sorted(d for block in clean for d in block):
        times = () if p.graph.uniform else tuple(p.graph.times[:, d, d].tolist())
        limits = () if p.limits_alike else tuple(p.limits.reshape(-1, p.stages)[d].tolist())
        key = p.counts[d], times, limits
        alike[key] = (*alike.get(key, ()), d)
    return found + list(alike.values())


def _by_zone(p: Problem) -> list[list[int]]:
    """The pipelines, grouped by the zones of their stages."""
    links = p.graph.links
    if links is None:
        return [list(range(p.pipelines))]
    found: dict[tuple[str | None, ...], list[int]] = {}
    for d in range(p.pipelines):
        found.setdefault(tuple(links.zones.get(host) for host in links.hosts[d]), []).append(d)
    return list(found.values())


def _alive(p: Problem, block: Block) -> bool:
    return all(any((d, s) not in p.dead for d in block) for s in range(p.stages))


def _fits(p: Problem, block: Block, bound: float) -> bool:
    return _alive(p, block) and _bound(_part(p, block)) <= SLOWER * bound


_bound = lru_cache(maxsize=256)(lower_bound)


def _part(p: Problem, block: tuple[int, ...]) -> Problem:
    """The problem of a block, with pipelines renumbered from 0. For a block without deaths, only one pipeline."""
    if not any(w.pipeline in block for w in p.dead):
        block = block[:1]
    number = {d: k for k, d in enumerate(block)}
    p = p.without_bytes  # fixes the limits, which depend on all workers of a stage in the job
    memory = p.memory_limit
    if isinstance(memory, dict) and "per_worker" in memory:
        mine = {
            f"{number[d]},{s}": p.limit(Worker(d, s))
            for d in block
            for s in range(p.stages)
            if p.limit(Worker(d, s)) < np.inf
        }
        memory = {"per_worker": mine, "default": None}
    return p.replace(
        pipelines=len(block),
        microbatches=tuple(p.counts[d] for d in block),
        failed=[(number[w.pipeline], w.stage) for w in sorted(p.dead) if w.pipeline in number],
        memory_limit=memory,
        links=None if p.graph.links is None else p.graph.links.of_pipelines(block),
        name=None,
    )


@lru_cache(maxsize=64)
def _planned(part: Problem, ticks: int) -> tuple[Instance, PartialSchedule, np.ndarray]:
    """The instance of a block, its schedule from one policy, and the ends of its stages, (P,) in ticks.

    All ops start as early as possible, so that a stage starts at about the same time in all blocks."""
    x = Instance.of(part, ticks)
    choices = Choices.of(x, turns=1, orders=FOREIGN + 1)
    row = 0 if (x.cap < part.total).any() else 1
    *_, ends, codes, starts = simulated(x, choices, choices.table(2)[row : row + 1], 0, late=False)
    return x, PartialSchedule(codes, starts, choices.hosts[0]), ends


class _BlockPlan(Plan):
    """The plans of all blocks side by side, with the optimizer steps of the whole job."""

    _parts: list[tuple[Block, Instance, PartialSchedule, np.ndarray]]

    def __init__(
        self,
        problem: Problem,
        arrays: OpArrays | None = None,
        lower_bound: float = 0.0,
        time_unit: str = "slots",
        layout: Layout | None = None,
        parts: Any = (),
    ) -> None:
        given = {"problem": problem, "lower_bound": lower_bound, "time_unit": time_unit, "layout": layout}
        given |= {"_parts": parts}
        self.__dict__.update(given if arrays is None else given | {"arrays": arrays})

    @cached_property
    def _ends(self) -> np.ndarray:
        """(P,) ticks: end of each stage's last gradient in all blocks."""
        return np.max([ends for *_, ends in self._parts], axis=0)

    @cached_property
    def _starts(self) -> list[np.ndarray]:
        """Start times of the ops of each part. In a repeated step, ops start as late as they can without delaying the
        end of any stage of the job."""
        return [_late(x, schedule, self._ends) if steady(x) else schedule.starts for _, x, schedule, _ in self._parts]

    @cached_property
    def period(self) -> float | None:  # type: ignore[override]
        """`Plan.period`, computed without building the arrays of all ops."""
        p = self.problem
        if p.optimizer != "staggered":
            return self.makespan
        ends = self._steps + np.array(p.per_stage(OpKind.OPTIMIZER))
        longest = max(p.per_stage(OpKind.OPTIMIZER))  # period of an idle worker
        for (_, x, schedule, _), starts in zip(self._parts, self._starts, strict=True):
            first = times(x, PartialSchedule(schedule.codes, starts, schedule.host))[1]
            works = first < NEVER
            spans = ends[np.flatnonzero(works) % p.stages] - first[works] / x.ticks
            longest = max(longest, float(spans.max(initial=0.0)))
        return longest

    @property
    def _steps(self) -> np.ndarray:
        """(P,): start of each stage's optimizer steps."""
        ready = self._ends / self._parts[0][1].ticks + np.array(self.problem.per_stage("allreduce"))
        return np.full(len(ready), ready.max()) if self.problem.optimizer == "barrier" else ready

    @cached_property
    def arrays(self) -> OpArrays:  # type: ignore[override]
        """The ops of all pipelines. The ops of a planned part are repeated for every copy of the part in its block."""
        p, P = self.problem, self.problem.stages
        copies = [len(block) // x.problem.pipelines for block, x, *_ in self._parts]
        size = sum(len(part[2].codes) * copy for part, copy in zip(self._parts, copies, strict=True))
        live = p.workers() if p.optimizer != "none" else []
        types = (np.uint8, np.int32, np.int16, np.int16, np.float64, np.float64)
        out = OpArrays(*(np.empty(size + len(live), dtype=t) for t in types))
        first, at = p.first.astype(np.int32), 0
        for (block, x, schedule, _), copy, starts in zip(self._parts, copies, self._starts, strict=True):
            kind, node = schedule.codes & 3, schedule.codes >> 2
            g, host = node // P, schedule.host[node]
            pipes = np.array(block, dtype=np.int16).reshape(copy, -1)  # (copies, pipelines of the part)
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
        ready = self._steps
        pipeline, stage = np.array(p.workers()).T
        out.kind[at:], out.microbatch[at:], out.stage[at:], out.pipeline[at:] = O, -1, stage, pipeline
        out.start[at:] = ready[stage]
        out.end[at:] = ready[stage] + np.array(p.per_stage(OpKind.OPTIMIZER))[stage]


def _late(x: Instance, schedule: PartialSchedule, ends: np.ndarray) -> np.ndarray:
    """Latest start times that still let the stages end by `ends`, aligned with the schedule's codes. ends: (P,),
    ticks."""
    starts = np.empty_like(schedule.starts)
    LOOPS.latest(
        x.stages, schedule.host, x.todo, x.sent, x.duration, x.travel, schedule.codes,
        np.arange(len(schedule.codes)), len(schedule.codes), np.tile(ends, x.problem.pipelines), starts,
    )  # fmt: skip
    return starts
