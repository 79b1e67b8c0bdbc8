"""A lower bound on `Plan.value` over all layouts of a problem that gives layers.

    bounds = LayoutBounds(problem)
    bounds.best                   # no plan of any layout has a smaller value
    bounds.layout(1.05)           # the most even layout with no term more than 5 % above `best`
    bounds.of((9, 9, 5, 9))       # the bound of one layout

Why it is a bound. The bound of a fixed layout (`stage_bounds.py`) is the largest of several terms, one or more for each
stage. The term of a stage depends on the other stages only through two times: the time of the first micro-batch through
all earlier stages, and the time of a round trip through all later stages. Both are sums over layers. In every layout,
the earlier stages have the layers below the stage's first layer a, and the later stages have the layers from its end b
on. So the term of stage s is a function t(s, a, b) of the stage's own two boundaries. Dynamic programming finds the
exact least maximum of t over all boundaries 0 = b(0) < b(1) < ... < b(P) = L, with L layers and P stages. If a term
depends on the rest of the layout, a smaller term replaces it:

- All earlier stages run at the speed of the fastest live worker among them, and so do all later stages.
- Among the stages to which gradients return, only stage 0 counts. Its remaining backward and O follow, so the dynamic
  program runs once for each length of stage 0.
- If workers differ in speed, the best split of the N micro-batches is not computed. Instead each worker d gets a number
  r(d), such that the sum of all r(d) - 1 is less than N. So in every split at least one worker d runs r(d)
  micro-batches or more.

Terms above the bound of one known layout are not needed, so stages whose work alone exceeds this bound are skipped.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np

from ..layers import Layout
from ..op_kinds import SPLIT
from ..problem import Problem
from . import stage_bounds
from .layout_terms import LayoutTerms, rates

Array = np.ndarray
ABOVE = 1.1
"""Terms are computed up to this multiple of the bound of one layout, because the search also visits layouts with a
higher bound."""


class LayoutBounds:
    """The terms t(s, a, b) of the bound (module docstring) for a problem with layers, and the bounds and layouts that
    follow from them.

    Raises ValueError if no layout leaves every stage room for its layers and one micro-batch."""

    def __init__(self, problem: Problem) -> None:
        p, model = problem, problem.model
        self.problem, self.count, self.sums = p, model.count, model.sums
        self.work = np.sum([self.sums[kind] for kind in SPLIT], axis=0)
        self.rates = rates(p)
        self._known: dict[int, list[Array]] = {}
        self._terms = LayoutTerms(p, stage_bounds.stage_bound(p.with_layout(self._by_work())) * ABOVE)
        self.terms = [self._terms.of(s) for s in range(p.stages)]

    @cached_property
    def best(self) -> float:
        """The least bound of any layout: the minimum, over all layouts, of the layout's largest term."""
        found = math.inf
        for n, first in self._first_stages():
            if first < found:
                found = min(found, max(first, float(self._least(np.maximum, self._after(n))[0][n])))
        return found

    def layout(self, slack: float = 1.0, power: float = 2.0, tilt: float = 0.0) -> Layout:
        """The layout with the least sum of term ** power, among those with all terms at most slack * best.

        tilt: how much more the last stage's term counts than the first stage's, as a share. The last stages start late
        and end early, so fewer layers there fill and drain the pipeline sooner."""
        level = max(self.best, 1e-300)
        highest = level * max(slack, 1 + 1e-12)

        def cost(t: Any) -> Any:
            return np.where(t <= highest, (t / level) ** power, np.inf)

        least = math.inf
        found: Layout = ()
        for n, first in self._first_stages():
            terms = [cost(t) * (1 + tilt * s / self.problem.stages) for s, t in enumerate(self._after(n), 1)]
            table = self._least(np.add, terms)
            if float(cost(first)) + table[0][n] < least:
                least = float(cost(first)) + table[0][n]
                found = (n, *self._path(n, terms, table))
        return found

    def of(self, layout: Layout) -> float:
        """The bound of one layout. inf if the bound is far above `best` (ABOVE) or the layout does not fit into
        memory."""
        ends = np.cumsum(layout).tolist()
        terms = [self.terms[0][0], *self._after(layout[0])]
        return float(max(term[b, n - 1] if n <= term.shape[1] else math.inf
                         for term, b, n in zip(terms, ends, layout, strict=True)))  # fmt: skip

    @property
    def in_proportion(self) -> Layout:
        """The layout in which each stage's work is in proportion to the throughput of its workers."""
        able = np.cumsum([1 / max(rate, 1e-300) for rate in self.rates])
        ends = np.searchsorted((self.work[1:] + self.work[:-1]) / 2, able / able[-1] * self.work[-1])
        P, found = self.problem.stages, [0]
        for s in range(P - 1):
            found.append(min(max(int(ends[s]), found[-1] + 1), self.count - (P - 1 - s)))
        return tuple(np.diff([*found, self.count]).tolist())

    # ---- dynamic programming over the boundaries

    def _first_stages(self) -> list[tuple[int, float]]:
        """(length, term) of every possible stage 0, sorted by term."""
        terms = self.terms[0][0]
        lengths = [n for n in range(1, terms.shape[1] + 1) if terms[n, n - 1] < math.inf]
        return sorted(((n, float(terms[n, n - 1])) for n in lengths), key=lambda entry: entry[1])

    def _after(self, n: int) -> list[Array]:
        """The terms of stages 1, 2, ... if stage 0 has n layers."""
        if n not in self._known:
            self._known[n] = self._made_after(n)
        return self._known[n]

    def _made_after(self, n: int) -> list[Array]:
        t = self._terms
        last, step = t.after_stage_0(n), t.step_of_stage_0(n)
        found = []
        for s, (alone, way) in enumerate(self.terms[1:], 1):
            term = np.maximum(alone, way + last + step)
            found.append(np.maximum(term, np.where(term < np.inf, t.returned(s, n) + step, np.inf)))
        return found

    def _least(self, both: np.ufunc, terms: list[Array]) -> list[Array]:
        """The table of the dynamic program over the stages of `terms`: one (L + 1,) array per stage, and one for the
        end. Entry [k][a] is the least cost of stages k, k + 1, ... if stage k starts at layer a.

        both: combines two costs."""
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
        """The numbers of layers of the stages in `terms` that minimize the sum of the terms, if the first of these
        stages starts at layer a.

        table: result of `_least`."""
        layout = []
        for term, after in zip(terms, table[1:], strict=True):
            lengths = np.arange(1, min(term.shape[1], self.count - a) + 1)
            layout.append(int(lengths[np.argmin(term[a + lengths, lengths - 1] + after[a + lengths])]))
            a += layout[-1]
        return tuple(layout)

    def _by_work(self) -> Layout:
        """A layout with even work and room for one micro-batch in flight at every stage."""
        p, L = self.problem, self.count
        held = self.sums["bytes"] + self.sums["activation_bytes"]
        capacity = math.inf if p.capacity_bytes is None else p.capacity_bytes * (1 + 1e-12)

        def within(level: float) -> Layout | None:
            """The layout that gives each stage, first to last, as many layers as `level` allows. None if layers are
            left over."""
            a, layout = 0, []
            for s, rate in enumerate(self.rates):
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

        low, high = 0.0, 2 * float(self.work[-1]) * max(self.rates) + 1.0
        found = within(high)
        if found is None:
            raise ValueError("capacity_bytes: no layout leaves every stage room for its layers and one micro-batch")
        for _ in range(40):
            middle = (low + high) / 2
            better = within(middle)
            low, high, found = (low, middle, better) if better else (middle, high, found)
        return found
