"""The figures under a picture: how long, how idle, how full.

    m = Measures.of(chart)
    m.makespan, m.period, m.bubble[stage], m.peak[stage]
    overhead(plan, base)                # 0.07: 7 % longer
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from recycle_schedules import Plan, Trace

from .chart import CUT, LOST, REDONE, REROUTED, B, Chart, F, I, W


@dataclass(frozen=True)
class Measures:
    """makespan, period (None for remainders and traces) and lower_bound in the chart's unit.

    bubble: by stage, the share of its live workers' time (a period long, else the makespan) without an op.
    peak: by stage, the most micro-batches in flight on one worker. rerouted, cut, redone, lost: numbers of ops."""

    makespan: float
    period: float | None
    lower_bound: float
    bubble: tuple[float, ...]
    peak: tuple[float, ...]
    rerouted: int
    cut: int
    redone: int
    lost: int

    @classmethod
    def of(cls, chart: Chart) -> Measures:
        period = None if isinstance(chart.plan, Trace) else chart.plan.period
        rerouted, cut, redone, lost = (int(((chart.marks & bit) != 0).sum()) for bit in (REROUTED, CUT, REDONE, LOST))
        bubble = tuple(_bubble(chart, chart.plan.makespan if period is None else period).tolist())
        return cls(
            chart.plan.makespan, period, chart.plan.lower_bound, bubble, tuple(_peak(chart).tolist()), rerouted, cut, redone, lost
        )  # fmt: skip

    @property
    def idle(self) -> float:
        """Mean of the stages' bubbles."""
        return float(np.mean(self.bubble)) if self.bubble else 0.0


def overhead(plan: Plan, base: Plan) -> float:
    """By what share a step of `plan` is longer than one of `base`: of periods, or of makespans if one has no period."""
    both = (plan.period, base.period)
    mine, other = both if None not in both else (plan.makespan, base.makespan)
    return mine / other - 1 if mine is not None and other else 0.0


def _bubble(chart: Chart, length: float) -> np.ndarray:
    """By stage. A worker that dies in the step counts until its death."""
    P = chart.problem.stages
    busy, lived = np.zeros(P), np.zeros(P)
    np.add.at(busy, chart.row % P, chart.end - chart.start)
    for row in range(len(chart.workers)):
        lived[row % P] += min(chart.dead_from.get(row, length), length)
    return np.clip(1 - busy / np.maximum(lived, 1e-12), 0.0, 1.0)


def _peak(chart: Chart) -> np.ndarray:
    """By stage: +1 at the start of F, -1 at the end of W or B (a part of it at the end of I), the highest sum on a worker.
    What is freed at an instant is free for what begins then. A cut op of a dead worker never frees what it holds."""
    P, release = chart.problem.stages, chart.problem.i_release
    held = {w.pipeline * P + w.stage: n for w, n in chart.problem.held.items()}
    events = [
        (rows, time, change)
        for kinds, times, amount in (((F,), chart.start, 1.0), ((I,), chart.end, -release), ((W,), chart.end, release - 1.0), ((B,), chart.end, -1.0))
        for pick in [np.isin(chart.kind, kinds)]
        for rows, time, change in [(chart.row[pick], times[pick], np.full(int(pick.sum()), amount))]
    ]  # fmt: skip
    row, time, change = (np.concatenate(x) for x in zip(*events, strict=True))
    order = np.lexsort((change, time, row))
    row, change = row[order], change[order]
    running = np.cumsum(change)
    begins = np.searchsorted(row, np.arange(len(chart.workers) + 1))
    peak = np.zeros(P)
    for r in range(len(chart.workers)):
        a, b = begins[r], begins[r + 1]
        before = held.get(r, 0.0)
        top = before if a == b else max(before, before + float((running[a:b] - (running[a - 1] if a else 0.0)).max()))
        peak[r % P] = max(peak[r % P], top)
    return np.round(peak, 6)


