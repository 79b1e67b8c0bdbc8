"""The figures under a picture: lengths, bubbles, memory.

m = Measures.of(chart)
m.makespan, m.period, m.bubble[stage], m.peak[stage]
overhead(plan, base)                # 0.07: 7 % longer
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from recycle_schedules import Plan, Trace
from recycle_schedules.analysis.figures import bubbles, lost, redone
from recycle_schedules.op_kinds import COMPUTE, F

from .chart import CUT, REROUTED, Chart


@dataclass(frozen=True)
class Measures:
    """The figures of one chart.

    makespan, period, lower_bound
                   in the chart's unit; period is None for a trace, and for the plan of a remainder
    idle, bubble   share of bubbles, in total and by stage
    lost, redone   numbers of ops (docs/figures.md defines them)
    peak           by stage, the peak number of micro-batches in flight on one worker
    rerouted, cut  numbers of ops
    between_hosts  boundary tensors that leave their host; None if the stage graph knows no hosts"""

    makespan: float
    period: float | None
    lower_bound: float
    idle: float
    bubble: tuple[float, ...]
    peak: tuple[float, ...]
    rerouted: int
    cut: int
    redone: int
    lost: int
    between_hosts: int | None

    @classmethod
    def of(cls, chart: Chart) -> Measures:
        rerouted, cut = (int(((chart.marks & bit) != 0).sum()) for bit in (REROUTED, CUT))
        plan, idle = chart.plan, bubbles(chart.plan)
        return cls(
            makespan=plan.makespan,
            period=period(plan),
            lower_bound=plan.lower_bound,
            idle=idle.share,
            bubble=idle.by_stage,
            peak=tuple(_peak(chart).tolist()),
            rerouted=rerouted,
            cut=cut,
            redone=redone(plan),
            lost=lost(plan),
            between_hosts=_between_hosts(chart),
        )


def overhead(plan: Plan, base: Plan) -> float:
    """The extra duration of a step of `plan` relative to a step of `base`: 0.07 if it is 7 % longer.

    Compares periods, or makespans if one of the plans has no period.
    """
    mine, other = period(plan), period(base)
    if mine is None or other is None:
        mine, other = plan.makespan, base.makespan
    return mine / other - 1 if other else 0.0


def period(plan: Plan) -> float | None:
    """The period of a plan. None for the plan of a remainder (the rest of a broken step), and for a trace, because one
    measured step does not show how far it overlaps with the next step."""
    return None if isinstance(plan, Trace) else plan.period


def _between_hosts(chart: Chart) -> int | None:
    hosts = np.array([chart.problem.graph.host(worker) or "" for worker in chart.workers])
    if not hosts[0]:
        return None
    sender, receiver = chart.links
    return int((hosts[chart.row[sender]] != hosts[chart.row[receiver]]).sum())


def _peak(chart: Chart) -> np.ndarray:
    """(P,): the peak number of micro-batches in flight on one worker of each stage.

    The number grows by 1 at the start of an F. It falls by 1 at the end of a B, by `i_release` at the end of an I, and
    by the rest at the end of a W. Memory that an op frees is available to ops that start at the same time. A cut op
    never frees memory."""
    P, release = chart.problem.stages, chart.problem.i_release
    kept, freed = np.zeros((2, len(chart)))
    kept[chart.kind == F] = 1.0
    for kind in COMPUTE:
        freed[(chart.kind == kind.code) & ((chart.marks & CUT) == 0)] = kind.frees(release)
    row = np.concatenate([chart.row, chart.row])
    change = np.concatenate([-freed, kept])
    order = np.lexsort((change, np.concatenate([chart.end, chart.start]), row))
    running = np.cumsum(change[order])
    ends = np.searchsorted(row[order], np.arange(len(chart.workers) + 1))
    held = {w.pipeline * P + w.stage: n for w, n in chart.problem.held.items()}
    peak = np.zeros(P)
    for r in range(len(chart.workers)):
        a, b = ends[r], ends[r + 1]
        rise = float((running[a:b] - (running[a - 1] if a else 0.0)).max(initial=0.0))
        peak[r % P] = max(peak[r % P], held.get(r, 0.0) + rise)
    return np.round(peak, 6)
