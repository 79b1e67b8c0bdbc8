"""A lower bound of `Plan.value` over all layouts of a problem that gives layers.

    bounds = LayoutBounds(problem)
    bounds.best                   # no plan of any layout has a smaller value
    bounds.layout(1.05)           # the most even layout with no term more than 5 % above that
    bounds.of((9, 9, 5, 9))       # the bound of one layout

Why it is a bound. Those of a fixed layout (`stage_bounds.py`) are the maximum over the stages of terms, and the term of
a stage knows of the other stages only how long a first micro-batch takes through all that is before it, and a round
trip through all that is behind it. Both are sums over layers: whatever the layout, the layers before a stage are those
below its first layer a, and those behind it the ones from its end b on. So the term of stage s is a function t(s, a, b)
of its own two boundaries, and the least maximum of t over all paths 0 = b(0) < b(1) < ... < b(P) = L is found exactly,
by dynamic programming. Where a term does depend on the rest of the layout it is made smaller:

- workers before or behind run at the speed of the fastest live worker of all those stages;
- of the stages to which the last gradient goes back only stage 0 counts. Its W and O come after that: so there is one
  such path problem for each length of stage 0;
- over workers that differ in speed the micro-batches are not split exactly: if r(d) - 1 over the stage's workers add up
  to less than N, then in every split some worker d gets at least r(d).

Terms above the bound of one known layout are not needed: only stages whose work alone is below it are looked at.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from functools import cached_property

import numpy as np

from ..layers import Layout
from ..ops import Worker
from ..problem import Problem
from . import stage_bounds

Array = np.ndarray
Share = tuple[float, int]
"""A worker's speed, and how many micro-batches it has."""
Span = Callable[[float, int], Array]
ABOVE = 1.1
"""Terms are known up to so much above the bound of one layout: those who search look at layouts above it, too."""


class LayoutBounds:
    """The terms t(s, a, b) of a problem with layers and what follows from them. ValueError if there is no layout in
    which all stages have room for their layers and one micro-batch."""

    def __init__(self, problem: Problem) -> None:
        p, model = problem, problem.model
        self.problem, self.count, self.sums = p, model.count, model.sums
        self.backward = self.sums["I"] + self.sums["W"]
        self.early = self.sums["I"] if p.backward != "coupled" else self.backward
        self.work = self.sums["F"] + self.backward
        self.hops = np.array([stage_bounds._least_latency(p, s) for s in range(p.stages - 1)])
        self.speeds = [[p.speeds.get(Worker(d, s), 1.0) for d in p.live[s]] for s in range(p.stages)]
        self.fast = np.array([max(v) for v in self.speeds])
        self.own = [_own(p, s, v) for s, v in enumerate(self.speeds)]
        self.some = [_some(p.total, v) for v in self.speeds]
        self._known: dict[int, list[Array]] = {}
        self.most = stage_bounds.stage_bound(p.with_layout(self._by_work())) * ABOVE

    @cached_property
    def best(self) -> float:
        """The least maximum of the terms over all layouts."""
        found = math.inf
        for n, first in self._first_stages():
            if first < found:
                found = min(found, max(first, float(self._least(np.maximum, self._after(n))[0][n])))
        return found

    def layout(self, slack: float = 1.0, power: float = 2.0, tilt: float = 0.0) -> Layout:
        """The layout with the least sum of the terms' powers among those whose terms are at most slack * best.

        tilt: how much more the last stage's term weighs than the first one's, as a share. The last stages begin late
        and end early; with fewer layers there the pipeline is filled and drained sooner."""
        level, least = max(self.best, 1e-300), math.inf
        found: Layout = ()
        cost = lambda t: np.where(t <= level * max(slack, 1 + 1e-12), (t / level) ** power, np.inf)  # noqa: E731
        for n, first in self._first_stages():
            terms = [cost(t) * (1 + tilt * s / self.problem.stages) for s, t in enumerate(self._after(n), 1)]
            table = self._least(np.add, terms)
            if float(cost(first)) + table[0][n] < least:
                least, found = float(cost(first)) + table[0][n], (n, *self._path(n, terms, table))
        return found

    def of(self, layout: Layout) -> float:
        """The bound of one layout; inf far above `best` (ABOVE), or if it has no room."""
        ends = np.cumsum(layout).tolist()
        terms = [self.terms[0][0], *self._after(layout[0])]
        return float(max(term[b, n - 1] if n <= term.shape[1] else math.inf
                         for term, b, n in zip(terms, ends, layout, strict=True)))  # fmt: skip

    @property
    def in_proportion(self) -> Layout:
        """The layout with stages as long as their workers are able, whatever else counts."""
        able = np.cumsum([1 / max(_least_work(*shares), 1e-300) for shares in zip(self.own, self.some, strict=True)])
        ends = np.searchsorted((self.work[1:] + self.work[:-1]) / 2, able / able[-1] * self.work[-1])
        P, found = self.problem.stages, [0]
        for s in range(P - 1):
            found.append(min(max(int(ends[s]), found[-1] + 1), self.count - (P - 1 - s)))
        return tuple(np.diff([*found, self.count]).tolist())

    # ---- dynamic programming over the boundaries

    def _first_stages(self) -> list[tuple[int, float]]:
        """(length, term) of what stage 0 can be, by term."""
        terms = self.terms[0][0]
        lengths = [n for n in range(1, terms.shape[1] + 1) if terms[n, n - 1] < math.inf]
        return sorted(((n, float(terms[n, n - 1])) for n in lengths), key=lambda entry: entry[1])

    def _after(self, n: int) -> list[Array]:
        """The terms of stages 1, 2, ... if stage 0 has n layers."""
        if n not in self._known:
            self._known[n] = self._made_after(n)
        return self._known[n]

    def _made_after(self, n: int) -> list[Array]:
        p, step = self.problem, 0.0
        if p.optimizer != "none":
            step = self.sums["O"][n] / (self.fast[0] if p.optimizer == "staggered" else min(self.speeds[0]))
            step += _per_stage(p.allreduce, p.stages)[0]
        last = (self.backward - self.early)[n] / self.fast[0] + step
        return [np.maximum(alone, way + last) for alone, way in self.terms[1:]]

    def _least(self, both: np.ufunc, terms: list[Array]) -> list[Array]:
        """(L + 1,) for each of some last stages, and one more: [k][a] is the least cost of those from the k-th on if
        that begins at layer a."""
        L = self.count
        end = np.full(L + 1, np.inf)
        end[L] = 0.0
        found = [end]
        for term in reversed(terms):
            here = np.full(L + 1, np.inf)
            for n in range(1, term.shape[1] + 1):
                np.minimum(here[: L + 1 - n], both(term[n:, n - 1], found[0][n:]), out=here[: L + 1 - n])
            found.insert(0, here)
        return found

    def _path(self, a: int, terms: list[Array], table: list[Array]) -> Layout:
        """The lengths of some last stages at least sum, if the first of them begins at layer a."""
        layout = []
        for term, after in zip(terms, table[1:], strict=True):
            lengths = np.arange(1, min(term.shape[1], self.count - a) + 1)
            layout.append(int(lengths[np.argmin(term[a + lengths, lengths - 1] + after[a + lengths])]))
            a += layout[-1]
        return tuple(layout)

    def _by_work(self) -> Layout:
        """A layout that is even by work, with room for one micro-batch in flight at every stage."""
        p, L = self.problem, self.count
        held = self.sums["bytes"] + self.sums["activation_bytes"]
        capacity = math.inf if p.capacity_bytes is None else p.capacity_bytes * (1 + 1e-12)
        rates = [_least_work(own, some) for own, some in zip(self.own, self.some, strict=True)]

        def within(level: float) -> Layout | None:
            """As many layers as each stage can have, from the first on; None if some are left over."""
            a, layout = 0, []
            for s, rate in enumerate(rates):
                allowed = self.work[a] + (level / rate if rate else math.inf)
                b = min(
                    np.searchsorted(self.work, allowed, "right"), np.searchsorted(held, held[a] + capacity, "right")
                )
                b = min(int(b) - 1, L - (p.stages - 1 - s))
                if b <= a:
                    return None
                layout.append(b - a)
                a = b
            return tuple(layout) if a == L else None

        low, high = 0.0, 2 * float(self.work[-1]) * max(rates) + 1.0
        found = within(high)
        if found is None:
            raise ValueError("capacity_bytes: in no layout have all stages room for their layers and one micro-batch")
        for _ in range(40):
            middle = (low + high) / 2
            better = within(middle)
            low, high, found = (low, middle, better) if better else (middle, high, found)
        return found

    # ---- terms

    @cached_property
    def terms(self) -> list[tuple[Array, Array]]:
        """(P) pairs of (L + 1, longest): [b, n - 1] belongs to stage s with the layers from b - n on. t(s, b - n, b)
        without, and with the way back to stage 0, where W and O of that are still missing; inf where that is no stage
        or is above `most`."""
        return [self._terms(s) for s in range(self.problem.stages)]

    def _terms(self, s: int) -> tuple[Array, Array]:
        p, L, P = self.problem, self.count, self.problem.stages
        rate = _least_work(self.own[s], self.some[s])
        ends = np.searchsorted(self.work, self.work + (self.most / rate if rate else math.inf), "right") - 1
        longest = max(1, min(int((ends - np.arange(L + 1)).max()), L - P + 1))
        b = np.arange(L + 1)[:, None]
        a = b - np.arange(1, longest + 1)
        fine = (a >= s) & (L - b >= P - 1 - s) & ((a == 0) | (s > 0)) & ((b == L) | (s < P - 1))
        a = np.maximum(a, 0)
        of = lambda sums: sums[b] - sums[a]  # noqa: E731
        pace = self.sums["F"] + self.early
        before, behind = (float(v.max(initial=0.0)) or 1.0 for v in (self.fast[:s], self.fast[s + 1 :]))
        beyond = (pace[L] - pace[b]) / behind + 2 * self.hops[s:].sum()
        limit = self._limits(s, of)
        fine &= limit >= 1
        slow, reduce = min(self.speeds[s]), _per_stage(p.allreduce, P)[s]
        step = of(self.sums["O"])
        if p.optimizer == "none":
            step, reduce = 0 * step, 0.0
        if p.total == 0:
            return np.where(fine, step / slow, np.inf), np.where(fine, -np.inf, np.inf)
        stage = of(self.sums["F"]), of(self.early), of(self.backward), limit, p.i_release, beyond
        span = _with_memory(*stage)
        if p.optimizer == "staggered":
            alone = self._fullest(s, lambda v, n: span(v, n) + reduce + step / v)
        else:
            head = self.sums["F"][a] / before + self.hops[:s].sum()
            alone = self._fullest(s, span) + head + reduce + step / slow
        last = span if p.backward == "coupled" else _until_last_gradient(*stage)
        way = self._fullest(s, last) + pace[a] / before + 2 * self.hops[:s].sum()
        fine &= (alone <= self.most) & (way <= self.most)
        return np.where(fine, alone, np.inf), np.where(fine, way, np.inf)

    def _limits(self, s: int, of: Callable[[Array], Array]) -> Array:
        """Most micro-batches in flight; a rounding error allows one more."""
        p, given = self.problem, stage_bounds._most_in_flight(self.problem, s)
        held, each = of(self.sums["bytes"]), of(self.sums["activation_bytes"])
        if p.capacity_bytes is None:
            return np.full_like(held, given)
        with np.errstate(divide="ignore", invalid="ignore"):
            fit = np.floor(np.where(each > 0, (p.capacity_bytes - held) / each, math.inf) * (1 + 1e-9))
        return np.where(held > p.capacity_bytes * (1 + 1e-9), 0.0, np.minimum(fit, given))

    def _fullest(self, s: int, span: Span) -> Array:
        """Least possible maximum of span(speed, n) over the splits of the micro-batches over a stage's live workers."""
        some = np.minimum.reduce([span(v, n) for v, n in self.some[s]])
        return np.maximum.reduce([some, *(span(v, n) for v, n in self.own[s])])


def _own(p: Problem, s: int, speeds: list[float]) -> list[Share]:
    """What the live workers have for themselves, whatever the split."""
    if p.reroute != "failed_only":
        return []
    return sorted({(v, p.counts[d]) for d, v in zip(p.live[s], speeds, strict=True) if p.counts[d]})


def _some(total: int, speeds: list[float]) -> list[Share]:
    """Shares of which at least one is reached in every split: each worker's at the time of the best split."""
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
    """Time on the fullest worker, in units of a micro-batch's work."""
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
        return (n * (F + whole) - np.minimum(behind, n) * late) / v + front

    return span


def _per_stage(value: float | tuple[float, ...], stages: int) -> tuple[float, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,) * stages
