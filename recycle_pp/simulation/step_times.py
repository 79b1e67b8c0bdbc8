"""The duration of a step for each membership (the number of live workers of each stage), from plans.

    times = StepTimes(job)
    times.reference                          # a fault-free step of 1F1B: the unit of all results
    times.one_f_one_b(stages=4, microbatches=38)
    layout = times.layout((5, 6, 6, 4))      # the boundaries between stages that suit this membership
    times.seconds((5, 6, 6, 4), layout)
    times.plan(spent)                        # makes plans for the memberships that lasted longest

The duration of a plan depends only on the membership, so each plan is made once. A month of a thousand machines still
has tens of thousands of memberships, most of which last for seconds. A simulation therefore runs twice:

1. With estimates from the *load* (the work of the busiest worker), to find out how long each membership lasts.
2. With plans for the memberships that lasted longest. The step time of any other membership is estimated as its load
   multiplied by the median ratio of plan to load.

`covered` is the share of the time with a planned membership. `spread` is the mean relative deviation of the plans from
their estimates.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
from recycle_schedules import Plan, Problem, plan
from recycle_schedules.analysis.one_f_one_b import one_f_one_b
from recycle_schedules.bounds import LayoutBounds
from recycle_schedules.layers import Layout
from recycle_schedules.op_kinds import SPLIT
from recycle_schedules.planner import plan_layout

from .job import Job, Shape, even

Key = tuple[Shape, Layout]

SEARCHED, SMALL = 24, 1500
"""In jobs of up to `SMALL` ops per step, the `SEARCHED` longest-lasting memberships get a search over layouts. All
others get the plan of the most even layout. In larger jobs, the step of this plan is within 0.4 % of the step that a
search finds."""


class StepTimes:
    """The durations of steps of one job, in seconds. plans: maximum number of plans to make."""

    def __init__(self, job: Job, plans: int = 64) -> None:
        self.job, self.most = job, plans
        self.planned: dict[Key, Plan] = {}
        self._layouts: dict[Shape, Layout] = {job.whole: job.layout}
        self._estimates: dict[Key, float] = {}
        # whether layers have moved from the initial layout -> median ratio of plan to load
        self._excess = {False: 1.0, True: 1.0}
        self.reference = self.one_f_one_b(job.stages, job.problem.counts[0])
        self._make((job.whole, job.layout))
        self.covered, self.spread = 1.0, 0.0

    # ---- schedules of other systems

    @cache  # noqa: B019  (lives as long as the simulation)
    def one_f_one_b(self, stages: int, microbatches: int) -> float:
        """Seconds of a 1F1B step of one pipeline with its best layout, optimizer steps included."""
        return one_f_one_b(self._usual(stages).replace(microbatches=microbatches)).makespan

    @cache  # noqa: B019
    def _usual(self, stages: int) -> Problem:
        """The problem of one 1F1B pipeline, with the best of several even layouts."""
        problem = self.job.restaged(stages, pipelines=1, backward="coupled", optimizer="barrier", memory_limit=None)
        layouts = {even(problem.model.count, stages), LayoutBounds(problem).layout()}
        layouts |= {self.job.layout} if stages == self.job.stages else set()
        return min((problem.with_layout(of) for of in sorted(layouts)), key=lambda p: one_f_one_b(p).makespan)

    # ---- schedules of recycle_pp

    def layout(self, shape: Shape) -> Layout:
        """The layout for the membership: that of its plan or, without a plan, the layout with the most even load."""
        if shape not in self._layouts:
            self._layouts[shape] = self._even(shape)
        return self._layouts[shape]

    def seconds(self, shape: Shape, layout: Layout) -> float:
        """Seconds of a step: the period of its plan or, without a plan, an estimate.

        Every stage must have a live worker.
        """
        key = shape, layout
        if key in self.planned:
            return self.planned[key].value
        if key not in self._estimates:
            self._estimates[key] = self._excess[layout != self.job.layout] * self.load(shape, layout)
        return self._estimates[key]

    def load(self, shape: Shape, layout: Layout) -> float:
        """Seconds of work of the busiest worker. No plan is shorter."""
        N = self.job.total
        return max(-(-N // n) * t for n, t in zip(shape, self.job.stage_seconds(layout), strict=True))

    def plan(self, spent: Mapping[Key, float]) -> None:
        """Plans the memberships that lasted longest. spent: seconds that each membership lasted."""
        ranked = sorted((key for key in spent if spent[key] > 0), key=lambda key: -spent[key])
        mine = self.job.layout
        for number, (shape, layout) in enumerate(ranked[: self.most]):
            if layout != mine and layout == self._layouts.get(shape):
                self._rebalance(shape, search=number < SEARCHED and 3 * self.job.total * self.job.stages <= SMALL)
            else:
                self._make((shape, layout))
        self.spread = max(map(self._learn, (False, True)))
        self._estimates.clear()
        self.covered = sum(spent[key] for key in ranked[: self.most]) / (sum(spent.values()) or 1.0)

    def _learn(self, moved: bool) -> float:
        """Updates the median ratio of plan to load. Returns the mean relative deviation from this median.

        moved: whether to use the plans in which layers have moved from the initial layout, or the other plans"""
        mine = self.job.layout
        ratios = np.array([p.value / self.load(*key) for key, p in self.planned.items() if (key[1] != mine) == moved])
        if not len(ratios):
            return 0.0
        self._excess[moved] = usual = float(np.median(ratios))
        return float(np.abs(ratios / usual - 1).mean())

    def _make(self, key: Key) -> None:
        if key not in self.planned:
            shape, layout = key
            self.planned[key] = plan(self.job.with_shape(shape).with_layout(layout))

    def _rebalance(self, shape: Shape, search: bool) -> None:
        problem = self.job.with_shape(shape)
        if search:
            found = plan_layout(problem)
        else:
            layout = LayoutBounds(problem).layout()
            found = plan(problem.with_layout(layout))
            found.__dict__["layout"] = layout
        assert found.layout is not None
        self._layouts[shape] = found.layout
        self.planned[shape, found.layout] = found

    def _even(self, shape: Shape) -> Layout:
        """The layout with the least work for the busiest worker, by bisection."""
        model, N = self.job.problem.model, self.job.total
        sums = np.sum([model.sums[kind] for kind in SPLIT], axis=0)
        shares = [-(-N // n) for n in shape]
        low = sums[-1] * N / sum(shape) * (1 - 1e-9)
        high = sums[-1] * max(shares)
        best = self._fitting(sums, shares, high)
        for _ in range(24):
            middle = (low + high) / 2
            found = self._fitting(sums, shares, middle)
            if found is None:
                low = middle
            else:
                best, high = found, middle
        return best or self.job.layout

    def _fitting(self, sums: np.ndarray, shares: list[int], most: float) -> Layout | None:
        """A layout in which no worker has more than `most` seconds of work; None if there is none."""
        layers, at, layout = len(sums) - 1, 0, []
        for s, share in enumerate(shares):
            end = int(np.searchsorted(sums, sums[at] + most / share * (1 + 1e-12), side="right")) - 1
            end = min(end, layers - (len(shares) - 1 - s))
            if end <= at:
                return None
            layout.append(end - at)
            at = end
        return tuple(layout) if at == layers else None
