"""The terms of the lower bound over layouts: one for each stage and each choice of its layers.

    terms = LayoutTerms(problem, most)
    alone, way = terms.of(s)      # lower bounds that depend on the boundaries of stage s only
    terms.returned(s, n)          # a term for the case that stage 0 has n layers

Arrays are (L + 1, longest), for L layers and at most `longest` layers per stage. Entry [b, n - 1] belongs to the stage
with the n layers before boundary b. The entry is inf if such a stage cannot exist or its term is above `most`. The
formulas are those of `stage_bounds.py` and `last_forward.py`, for all choices at once. If a formula depends on the rest
of the layout, a smaller value replaces it (`layout_bound.py`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..op_kinds import OpKind
from ..ops import Worker
from ..problem import Problem
from . import stage_bounds
from .last_forward import from_first_to_last, pipelines

Array = np.ndarray
Share = tuple[float, int]
"""A worker's speed and number of micro-batches."""
Span = Callable[[float, int], Array]


@dataclass(frozen=True)
class _Choices:
    """The possible choices of layers for a stage, with the resulting durations and limits; arrays (L + 1, longest)."""

    fine: Array  # whether the stage can exist and has room for one micro-batch
    F: Array
    early: Array  # time that the backward takes until it passes on the gradient
    whole: Array  # the whole backward
    step: Array  # the optimizer step
    limit: Array  # maximum number of micro-batches in flight
    fill: Array  # time until the first micro-batch arrives at the stage
    back: Array  # time from the end of a micro-batch's I at the stage to the end of its I at stage 0
    beyond: Array  # round trip through the later stages


class LayoutTerms:
    """The terms of a problem with layers; terms above `most` are inf."""

    def __init__(self, problem: Problem, most: float) -> None:
        p = problem
        self.problem, self.most, self.count, self.sums = p, most, p.model.count, p.model.sums
        self.backward = self.sums[OpKind.BACKWARD_INPUT] + self.sums[OpKind.BACKWARD_WEIGHT]
        self.early = self.sums[OpKind.BACKWARD_INPUT] if p.backward != "coupled" else self.backward
        self.hops = np.array([stage_bounds._least_latency(p, s) for s in range(p.stages - 1)])
        self.speeds = _speeds(p)
        self.fast = np.array([max(v) for v in self.speeds])
        self.shares = [_shares(p, s, v) for s, v in enumerate(self.speeds)]
        self.pipelines = pipelines(p)
        self._choices = [self._of_stage(s) for s in range(p.stages)]

    def of(self, s: int) -> tuple[Array, Array]:
        """The terms (alone, way) of stage s, for each choice of its layers.

        alone  lower bound on `Plan.value` that follows from stage s alone
        way    lower bound on the time from the start of the step until the last gradient has returned from stage s to
               stage 0. Does not include the W, all-reduce and O of stage 0 that follow"""
        p, x, slow = self.problem, self._choices[s], min(self.speeds[s])
        reduce = _per_stage(p.allreduce, p.stages)[s] if p.optimizer != "none" else 0.0
        if p.total == 0:
            return np.where(x.fine, x.step / slow, np.inf), np.where(x.fine, -np.inf, np.inf)
        stage = x.F, x.early, x.whole, x.limit, p.i_release, x.beyond
        span = _with_memory(*stage)
        if p.optimizer == "staggered":
            alone = self._fullest(s, lambda v, n: span(v, n) + reduce + x.step / v)
        else:
            alone = self._fullest(s, span) + x.fill + reduce + x.step / slow
        last = span if p.backward == "coupled" else _until_last_gradient(*stage)
        way = self._fullest(s, last) + x.fill + x.back
        fine = x.fine & (alone <= self.most) & (way <= self.most)
        return np.where(fine, alone, np.inf), np.where(fine, way, np.inf)

    def after_stage_0(self, n: int) -> float:
        """Time that stage 0 needs for the W of one micro-batch, if the stage has n layers. 0 if B runs whole."""
        return float((self.backward - self.early)[n] / self.fast[0])

    def step_of_stage_0(self, n: int) -> float:
        """Time of the all-reduce and the optimizer step of stage 0, if the stage has n layers."""
        p = self.problem
        if p.optimizer == "none":
            return 0.0
        step = self.sums[OpKind.OPTIMIZER][n] / (self.fast[0] if p.optimizer == "staggered" else min(self.speeds[0]))
        return float(step) + _per_stage(p.allreduce, p.stages)[0]

    def returned(self, s: int, n: int) -> Array:
        """The bound of `last_forward.py` for stages 0 and s, if stage 0 has n layers: the time from the start of the
        step to the end of the last W at stage 0. -inf if the bound does not apply."""
        p, x = self.problem, self._choices[s]
        found = np.full(x.F.shape, -np.inf)
        up = np.maximum(x.back - self.early[n] / self.fast[:s].max(), 0.0)
        for count, speeds, together in self.pipelines:
            if together[0, s]:
                v, own = speeds[s], self.backward[n] / speeds[0]
                limit = np.maximum(x.limit, 1.0)
                end = from_first_to_last(
                    count, x.F / v, x.early / v, x.whole / v, limit, p.i_release, x.beyond, up, own
                )
                found = np.maximum(found, x.fill + end)
        return found

    def _of_stage(self, s: int) -> _Choices:
        p, L, P = self.problem, self.count, self.problem.stages
        forward, step = self.sums[OpKind.FORWARD], self.sums[OpKind.OPTIMIZER]
        rate = _least_work(*self.shares[s])
        work = forward + self.backward
        ends = np.searchsorted(work, work + (self.most / rate if rate else math.inf), "right") - 1
        longest = max(1, min(int((ends - np.arange(L + 1)).max()), L - P + 1))
        b = np.arange(L + 1)[:, None]
        a = b - np.arange(1, longest + 1)
        fine = (a >= s) & (L - b >= P - 1 - s) & ((a == 0) | (s > 0)) & ((b == L) | (s < P - 1))
        a = np.maximum(a, 0)

        def of(sums: Array) -> Array:
            """(L + 1, longest): the sum over the layers of each choice. sums: prefix sums."""
            return sums[b] - sums[a]

        before, behind = (float(v.max(initial=0.0)) or 1.0 for v in (self.fast[:s], self.fast[s + 1 :]))
        hops = self.hops[:s].sum()
        pace = forward + self.early
        limit = self._limits(s, of)
        return _Choices(
            fine & (limit >= 1), of(forward), of(self.early), of(self.backward),
            of(step) * (p.optimizer != "none"), limit,
            fill=forward[a] / before + hops, back=self.early[a] / before + hops,
            beyond=(pace[L] - pace[b]) / behind + 2 * self.hops[s:].sum(),
        )  # fmt: skip

    def _limits(self, s: int, of: Callable[[Array], Array]) -> Array:
        """Maximum number of micro-batches in flight, for each choice of layers. May be one too high, because it
        tolerates rounding errors."""
        p, given = self.problem, stage_bounds._most_in_flight(self.problem, s)
        held, each = of(self.sums["bytes"]), of(self.sums["activation_bytes"])
        if p.capacity_bytes is None:
            return np.full_like(held, given)
        with np.errstate(divide="ignore", invalid="ignore"):
            fit = np.floor(np.where(each > 0, (p.capacity_bytes - held) / each, math.inf) * (1 + 1e-9))
        return np.where(held > p.capacity_bytes * (1 + 1e-9), 0.0, np.minimum(fit, given))

    def _fullest(self, s: int, span: Span) -> Array:
        """A lower bound on the maximum of span(speed, n) over all splits of the micro-batches over the stage's live
        workers."""
        own, some = self.shares[s]
        least = np.minimum.reduce([span(v, n) for v, n in some])
        return np.maximum.reduce([least, *(span(v, n) for v, n in own)])


def rates(p: Problem) -> list[float]:
    """(P,): least time that each stage's busiest worker needs for a step. The unit is the time of one micro-batch on a
    worker of speed 1."""
    return [_least_work(*_shares(p, s, v)) for s, v in enumerate(_speeds(p))]


def _speeds(p: Problem) -> list[list[float]]:
    return [[p.speeds.get(Worker(d, s), 1.0) for d in p.live[s]] for s in range(p.stages)]


def _shares(p: Problem, s: int, speeds: list[float]) -> tuple[list[Share], list[Share]]:
    return _own(p, s, speeds), _some(p.total, speeds)


def _own(p: Problem, s: int, speeds: list[float]) -> list[Share]:
    """The shares that live workers have in every split: the micro-batches of their own pipelines. [] if a live worker
    may pass them to peers."""
    if p.reroute != "failed_only":
        return []
    return sorted({(v, p.counts[d]) for d, v in zip(p.live[s], speeds, strict=True) if p.counts[d]})


def _some(total: int, speeds: list[float]) -> list[Share]:
    """One share for each speed: the number of micro-batches that keep a worker of this speed busy until the best split
    ends. In every split, at least one worker has its speed's share or more."""
    if len(set(speeds)) == 1:
        return [(speeds[0], -(-total // len(speeds)))]
    heap = [(1 / v, v, 1) for v in speeds]
    heapq.heapify(heap)
    top = 0.0
    for _ in range(total):
        top, v, n = heap[0]
        heapq.heapreplace(heap, ((n + 1) / v, v, n + 1))
    return sorted({(v, math.ceil(top * v * (1 - 1e-12))) for v in speeds})


def _least_work(own: list[Share], some: list[Share]) -> float:
    """Least time that the busiest worker needs for a step. The unit is the time of one micro-batch at speed 1."""
    return max([min(n / v for v, n in some), *(n / v for v, n in own)])


def _with_memory(F: Array, early: Array, whole: Array, L: Array, i_release: float, beyond: Array) -> Span:
    """`stage_bounds._with_memory` for arrays of stages."""
    late = whole - early
    behind = L / (1 - i_release) if i_release < 1 else np.full_like(L, np.inf)

    def span(v: float, n: int) -> Array:
        work, trip = n * (F + whole) / v, beyond + (F + early) / v
        stay = trip + late / v
        before, after = (np.minimum(L, n) * F + early) / v, (F + np.minimum(behind, n) * whole) / v
        front, back = np.maximum(0.0, trip - before), np.maximum(0.0, stay - after)
        apart = (work >= trip + stay) | (work > (before + after) * (1 + 1e-9))
        idle = np.where(apart, front + back, np.maximum(front, back))
        with np.errstate(divide="ignore", invalid="ignore"):
            in_turn = np.nan_to_num(n * (trip + (1 - i_release) * late / v) / np.minimum(L, n))
        return np.maximum(work + idle, in_turn)

    return span


def _until_last_gradient(F: Array, early: Array, whole: Array, L: Array, i_release: float, beyond: Array) -> Span:
    """`stage_bounds._until_last_gradient` for arrays of stages."""
    late = whole - early
    behind = L / (1 - i_release) if i_release < 1 else np.full_like(L, np.inf)

    def span(v: float, n: int) -> Array:
        front = np.maximum(0.0, beyond + (1 - np.minimum(L, n)) * F / v)
        busy = (n * (F + whole) - np.minimum(behind, n) * late) / v + front
        last_f = (n * F + (n - np.minimum(behind, n)) * whole) / v + np.where(n > L, front, 0.0)
        return np.maximum(busy, last_f + beyond + early / v)

    return span


def _per_stage(value: float | tuple[float, ...], stages: int) -> tuple[float, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,) * stages
