"""Failure Normalization: where should the dead places be, and which moves pay off?

    best = normalize(problem, horizon=1000, move_cost=50.0)
    best.moves          # [(Worker(0, 1), Worker(1, 2)), ...]: the first takes over the role of the second, dead one
    best.period         # of the steady step afterwards, as the bounds see it

Only the number of deaths at each stage matters: k dead among D leave D - k workers for all micro-batches. For a
candidate period T let K_s(T) be the most deaths that stage s tolerates; T can be reached iff sum K_s(T) >= f, with
sum_s max(0, deaths_s - K_s(T)) moves. All candidates are tried (there are at most P * D), and the one with the least
horizon * T + moves * cost is taken. Source: the threshold method for ReCycle's Failure Normalization.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ops import Worker
from ..problem import Problem


@dataclass(frozen=True)
class Normal:
    """deaths: dead places per stage after the moves; period: bound of the steady period then, in the problem's unit."""

    moves: list[tuple[Worker, Worker]]
    deaths: tuple[int, ...]
    period: float
    before: float


def normalize(problem: Problem, *, horizon: float, move_cost: float | tuple[float, ...] = 0.0) -> Normal:
    """The moves that pay off within `horizon` steps.

    move_cost: time that a move into a stage costs (loading the stage's state), one for all or one per stage. ValueError
    for remainders: moves are made between steps."""
    if problem.remainder:
        raise ValueError("moves are made between steps, not in the remainder of one")
    P, D = problem.stages, problem.pipelines
    deaths = [D - len(live) for live in problem.live]
    costs = move_cost if isinstance(move_cost, tuple) else (move_cost,) * P
    spans = [[stage_period(problem, s, k) for k in range(D)] for s in range(P)]
    before = max(spans[s][deaths[s]] for s in range(P))
    best = (horizon * before, list(deaths))
    for T in sorted({x for row in spans for x in row if x <= before}):
        room = [sum(x <= T for x in row) - 1 for row in spans]
        if min(room) < 0 or sum(room) < sum(deaths):
            continue
        after = _place(deaths, room)
        total = horizon * T + sum(costs[s] * max(0, deaths[s] - after[s]) for s in range(P))
        if total < best[0] - 1e-9 * abs(best[0]):
            best = (total, after)
    after = best[1]
    return Normal(_moves(problem, deaths, after), tuple(after), max(spans[s][after[s]] for s in range(P)), before)


def stage_period(problem: Problem, stage: int, dead: int) -> float:
    """Least steady period of a stage with `dead` dead workers, all alike: the fullest worker's micro-batches, the
    all-reduce and the optimizer step."""
    F, I, W, B, O = (problem.per_stage(kind)[stage] for kind in "FIWBO")
    backward = {"coupled": B, "decoupled": I + W, "mixed": min(B, I + W)}[problem.backward]
    fullest = max(-(-problem.total // (problem.pipelines - dead)), max(problem.counts, default=0))
    tail = problem.per_stage("allreduce")[stage] + O if problem.optimizer != "none" else 0.0
    return fullest * (F + backward) + tail


def _place(deaths: list[int], room: list[int]) -> list[int]:
    """Dead places per stage within `room`: what is too much goes where most room is left."""
    after = [min(k, r) for k, r in zip(deaths, room, strict=True)]
    for _ in range(sum(deaths) - sum(after)):
        s = max(range(len(room)), key=lambda s: room[s] - after[s])
        after[s] += 1
    return after


def _moves(problem: Problem, deaths: list[int], after: list[int]) -> list[tuple[Worker, Worker]]:
    """Who moves where. Workers of pipelines that are hit already move first: clean pipelines stay clean."""
    hurt = [sum(w.pipeline == d for w in problem.dead) for d in range(problem.pipelines)]
    givers = [
        Worker(d, s)
        for s in range(problem.stages)
        for d in sorted(problem.live[s], key=lambda d: (-hurt[d], d))[: max(0, after[s] - deaths[s])]
    ]
    takers = []
    for s in range(problem.stages):
        dead = sorted(w for w in problem.dead if w.stage == s)
        takers += dead[: max(0, deaths[s] - after[s])]
    return list(zip(givers, takers, strict=True))
