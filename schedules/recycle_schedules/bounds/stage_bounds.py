"""Lower bounds on `Plan.value` for whole steps with fixed stages.

    stage_bound(problem)    # of the period with a staggered optimizer, else of the makespan
    steady_bounds(problem)  # {"makespan": ..., "period": ...}

These bounds consider one stage s. They assume that other stages delay it only by the travel time of a micro-batch:

    makespan >= fill(s) + span(s) + all-reduce + O        (fill: the first micro-batch reaches s)
    period   >= span(s) + all-reduce + O                  (staggered: only the stage itself)
    both     >= way(u, s) + span'(s) + W + all-reduce + O (way: the first micro-batch comes from an earlier stage u, and
                                                           the last one's gradient returns to u)

span(s) is the time of the busiest worker in the best split of the micro-batches over the stage's live workers. A memory
limit of L micro-batches adds idle time on a worker, for three reasons:

- Before the first gradient returns, the worker can run at most L forwards and one backward.
- Before the gradient of the last forward returns, the worker can run at most one forward and L backwards.
- Each micro-batch occupies one of the L slots for a full round trip.

The first two idle times add up if they cannot overlap. This is so if the work takes longer than both periods together,
or exceeds the work that fits into both. span'(s) ends with the last I. At that time at most L micro-batches can be
waiting for W. Before the last F, a round trip earlier, the backward of all but L micro-batches is done.

`last_forward.py` considers two stages that delay each other.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..op_kinds import COMPUTE, OpKind
from ..ops import Worker
from ..problem import Problem
from .last_forward import from_first_to_last, pipelines

Array = np.ndarray


def stage_bound(problem: Problem, limits: Sequence[float] | None = None) -> float:
    """The entry of `steady_bounds` that bounds `Plan.value`."""
    both = steady_bounds(problem, limits)
    return both["period"] if problem.optimizer == "staggered" else both["makespan"]


@dataclass(frozen=True)
class _Times:
    """Least durations of one micro-batch at each stage, (P,)."""

    forward: tuple[float, ...]
    early: tuple[float, ...]  # from the start of the backward until it passes on the gradient
    late: tuple[float, ...]  # the rest of the backward
    whole: tuple[float, ...]  # the whole backward
    longest: tuple[float, ...]  # the longest whole backward that a worker may choose

    @classmethod
    def of(cls, p: Problem) -> _Times:
        F, I, W, B = (p.per_stage(kind) for kind in COMPUTE)
        split = tuple(i + w for i, w in zip(I, W, strict=True))
        early = {"coupled": B, "decoupled": I, "mixed": tuple(map(min, I, B))}[p.backward]
        whole = {"coupled": B, "decoupled": split, "mixed": tuple(map(min, B, split))}[p.backward]
        longest = {"coupled": B, "decoupled": split, "mixed": tuple(map(max, B, split))}[p.backward]
        return cls(F, early, tuple(w - e for w, e in zip(whole, early, strict=True)), whole, longest)


def steady_bounds(p: Problem, limits: Sequence[float] | None = None) -> dict[str, float]:
    """Lower bounds on the makespan and the period of a whole step, optimizer steps included.

    limits: as for `lower_bound`."""
    t = _Times.of(p)
    P, N = p.stages, p.total
    speeds = _speeds(p)
    alone = _alone(p, speeds)
    fast = [max(v) for v in speeds]
    hops = [_least_latency(p, s) for s in range(P - 1)]
    fill_f = [t.forward[s] / fast[s] for s in range(P)]
    fill_g = [t.early[s] / fast[s] for s in range(P)]
    O, reduce = (p.per_stage(k) if p.optimizer != "none" else (0.0,) * P for k in (OpKind.OPTIMIZER, "allreduce"))
    makespan = period = max(O[s] / min(speeds[s]) for s in range(P))
    for s in range(P if N else 0):
        head = sum(fill_f[:s]) + sum(hops[:s])
        beyond = sum(fill_f[s + 1 :]) + sum(fill_g[s + 1 :]) + 2 * sum(hops[s:])
        L = _most_in_flight(p, s) if limits is None else limits[s]
        span = _with_memory(t, s, L, p.i_release, beyond)
        fullest = _fullest(N, speeds[s], alone[s], span)
        makespan = max(makespan, head + fullest + reduce[s] + O[s] / min(speeds[s]))
        period = max(period, _fullest(N, speeds[s], alone[s], _followed_by(span, reduce[s], O[s])))
        if p.backward == "coupled":
            trip = fullest
        else:
            trip = _fullest(N, speeds[s], alone[s], _until_last_gradient(t, s, L, p.i_release, beyond))
        for u in reversed(range(s)):  # the first micro-batch comes through u, and the last gradient returns there
            trip += fill_f[u] + fill_g[u] + 2 * hops[u]
            end = trip + t.late[u] / fast[u] + reduce[u]
            period = max(period, end + O[u] / fast[u])
            if u == 0:
                makespan = max(makespan, end + O[u] / min(speeds[u]))
    if N:
        from_begin, from_own = _two_stages(p, t, limits, np.array(fast), np.array(hops), np.array(O), np.array(reduce))
        makespan, period = max(makespan, from_begin), max(period, from_own)
    return {"makespan": makespan, "period": period if p.optimizer == "staggered" else makespan}


def _two_stages(
    p: Problem, t: _Times, limits: Sequence[float] | None, fast: Array, hops: Array, O: Array, reduce: Array
) -> tuple[float, float]:
    """The bounds of `last_forward.py` on the makespan and on the period, each the maximum over all pairs of a stage v
    and a later stage u. Both times end with v's optimizer step. The makespan starts with the step, the period with v's
    first F.

    fast, O, reduce: (P,). hops: (P - 1,)."""
    F, early, whole = (np.array(each) for each in (t.forward, t.early, t.whole))
    L = np.array([_most_in_flight(p, s) for s in range(p.stages)] if limits is None else limits)
    # entry s: the sum over the stages before stage s
    down = np.concat(([0.0], np.cumsum(F / fast)))
    back = np.concat(([0.0], np.cumsum(early / fast)))
    hop = np.concat(([0.0], np.cumsum(hops)))
    beyond = down[-1] - down[1:] + back[-1] - back[1:] + 2 * (hop[-1] - hop)
    hop_up = hop - hop[:, None]  # [v, u]
    up = back[:-1] - back[1:, None] + hop_up
    fill = down[:-1] + hop
    makespan = period = 0.0
    for n, speeds, together in pipelines(p):
        own = (whole / speeds)[:, None]
        ends = from_first_to_last(n, F / speeds, early / speeds, whole / speeds, L, p.i_release, beyond, up, own)
        ends += (reduce + O / speeds)[:, None]
        found = np.triu(together & (L >= 1), 1)
        if found.any():
            makespan = max(makespan, float((ends + fill)[found].max()))
            period = max(period, float((ends + fill - fill[:, None])[found].max()))
    return makespan, period


Span = Callable[[float, int], float]
"""span(v, n): time of n micro-batches on a worker of speed v."""


def _work(cost: float) -> Span:
    """The span without idle time. cost: work of one micro-batch."""
    return lambda v, n: n * cost / v


def _followed_by(span: Span, reduce: float, step: float) -> Span:
    """A span followed by the stage's all-reduce and optimizer step."""
    return lambda v, n: span(v, n) + reduce + step / v


def _with_memory(t: _Times, s: int, L: float, i_release: float, beyond: float) -> Span:
    """The span on a worker with at most L micro-batches in flight. beyond: round trip of a micro-batch through the
    later stages."""
    F, early, late, whole, longest = t.forward[s], t.early[s], t.late[s], t.whole[s], t.longest[s]
    behind = _behind(L, i_release)

    def span(v: float, n: int) -> float:
        work, trip = n * (F + whole) / v, beyond + (F + early) / v
        stay = trip + late / v
        before, after = (min(L, n) * F + early) / v, (F + min(behind, n) * longest) / v  # most work in trip and stay
        front, back = max(0.0, trip - before), max(0.0, stay - after)
        apart = work >= trip + stay or work > (before + after) * (1 + 1e-9)  # the two idle times cannot overlap
        idle = front + back if apart else max(front, back)
        return max(work + idle, n * (trip + (1 - i_release) * late / v) / min(L, n))

    return span


def _until_last_gradient(t: _Times, s: int, L: float, i_release: float, beyond: float) -> Span:
    """The span from the first F to the end of the last I. Only the micro-batches that the worker then holds, at most L,
    can still lack their W."""
    F, early, late, whole = t.forward[s], t.early[s], t.late[s], t.whole[s]
    behind = _behind(L, i_release)

    def span(v: float, n: int) -> float:
        front = max(0.0, beyond + (1 - min(L, n)) * F / v)
        busy = (n * (F + whole) - min(behind, n) * late) / v + front
        last_f = (n * F + (n - min(behind, n)) * whole) / v + (front if n > L else 0.0)
        return max(busy, last_f + beyond + early / v)

    return span


def _behind(L: float, i_release: float) -> float:
    """Maximum number of micro-batches that a worker can hold between I and W."""
    return L / (1 - i_release) if i_release < 1 else math.inf


def _least_latency(p: Problem, s: int) -> float:
    """The shortest message time between stages s and s + 1. Only links within a pipeline count if no micro-batch leaves
    its own pipeline."""
    stays = p.pipelines == 1 or (p.reroute == "failed_only" and len(p.live[s]) == len(p.live[s + 1]) == p.pipelines)
    return p.graph.least(s, within=stays)


def _most_in_flight(p: Problem, s: int) -> float:
    """The largest limit of the stage's live workers."""
    return max(p.limit(Worker(d, s)) for d in (p.live[s][:1] if p.limits_alike else p.live[s]))


def _speeds(p: Problem) -> list[list[float]]:
    """For every stage, the speeds of its live workers."""
    given = p.speeds
    if not given:
        return [[1.0] * len(live) for live in p.live]
    return [[given.get(Worker(d, s), 1.0) for d in live] for s, live in enumerate(p.live)]


def _alone(p: Problem, speeds: list[list[float]]) -> list[set[tuple[float, int]]]:
    """For every stage, the different pairs (speed, micro-batches of the own pipeline, at least 1) of live workers that
    must run all micro-batches of their own pipeline."""
    if p.reroute != "failed_only":
        return [set()] * p.stages
    if not p.speeds and len(set(p.counts)) == 1:
        return [{(1.0, p.counts[0])} if p.total else set()] * p.stages
    of = zip(p.live, speeds, strict=True)
    return [{(v, p.counts[d]) for d, v in zip(live, fast, strict=True) if p.counts[d]} for live, fast in of]


def _fullest(total: int, speeds: list[float], alone: set[tuple[float, int]], span: Span) -> float:
    """The least maximum of span(speed, n) over all splits of the micro-batches over the stage's live workers.

    total   micro-batches of all pipelines
    alone   the stage's entry of `_alone`"""
    own = max((span(v, n) for v, n in alone), default=0.0)
    if len(set(speeds)) == 1:
        return max(own, span(speeds[0], -(-total // len(speeds))))
    heap = [(span(v, 1), v, 1) for v in speeds]
    heapq.heapify(heap)
    for _ in range(total):
        top, v, n = heap[0]
        heapq.heapreplace(heap, (span(v, n + 1), v, n + 1))
    return max(own, top)
