"""The text and figures under a picture.

console.print(table([chart, other]))
for sentence in recovery(chart): print(sentence)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from recycle_schedules import Plan, Worker
from recycle_schedules.analysis.figures import redone
from rich.table import Table

from recycle_pp.telemetry.words import names, plural

from .chart import CUT, LOST, REDONE, Chart
from .measures import Measures, overhead, period

Baselines = Sequence[tuple[str, Plan]]
"""(name, plan): further plans of the same job for comparison, for instance "fault-free"."""


def table(charts: Sequence[Chart], baselines: Baselines = ()) -> Table:
    """The figures, with one column per chart."""
    out = Table(box=None, pad_edge=False, show_header=len(charts) > 1)
    out.add_column("", overflow="fold")
    for chart in charts:
        many = len(charts) > 1
        out.add_column(chart.title if many else "", justify="right" if many else "left", overflow="fold")
    for name, cells in figures(charts, baselines):
        out.add_row(name, *cells)
    return out


def figures(charts: Sequence[Chart], baselines: Baselines = ()) -> list[tuple[str, list[str]]]:
    """The rows of the table: (name, one cell per chart)."""
    measures = [Measures.of(c) for c in charts]
    units = [c.unit for c in charts]

    def times(values: Sequence[float | None]) -> list[str]:
        return [f"{number(v)} {u}" if v else "" for v, u in zip(values, units, strict=True)]

    hit = [min(map(len, c.problem.live)) < c.problem.pipelines for c in charts]
    broken = [c.recovery is not None or m.redone > 0 for c, m in zip(charts, measures, strict=True)]
    rows = [
        ("period", times([m.period for m in measures])),
        ("makespan", times([m.makespan for m in measures])),
        ("lower bound", [_bound(m, u) for m, u in zip(measures, units, strict=True)]),
        (f"against {charts[0].title}", ["", *(_against(c.plan, charts[0].plan) for c in charts[1:])]),
        *((f"against {name}", [_against(c.plan, plan) for c in charts]) for name, plan in baselines),
        ("layers by stage", [_by_stage(c.plan.layout or (), str) for c in charts]),
        ("bubbles", [percent(m.idle) for m in measures]),
        ("  by stage", [_by_stage(m.bubble, lambda x: f"{x:.0%}") for m in measures]),
        ("peak micro-batches in flight", [number(max(m.peak, default=0.0)) for m in measures]),
        ("  by stage", [_by_stage(m.peak, number) for m in measures]),
        ("live workers by stage", [_by_stage([len(p) for p in c.problem.live], str) if h else ""
                                   for c, h in zip(charts, hit, strict=True)]),
        ("re-routed ops", [str(m.rerouted) if m.rerouted else "" for m in measures]),
        ("lost ops", [str(m.lost) if b else "" for m, b in zip(measures, broken, strict=True)]),
        ("tensors between hosts", ["" if m.between_hosts is None else str(m.between_hosts) for m in measures]),
        ("redone ops", [str(m.redone) if b else "" for m, b in zip(measures, broken, strict=True)]),
    ]  # fmt: skip
    return [(name, cells) for name, cells in rows if any(cells)]


def _bound(m: Measures, unit: str) -> str:
    """The lower bound and the distance of the plan from it, as text; "" without a bound."""
    if not m.lower_bound:
        return ""
    value = m.makespan if m.period is None else m.period
    gap = value / m.lower_bound - 1
    return f"{number(m.lower_bound)} {unit} ({'proven optimal' if gap < 1e-6 else f'{gap:.2%} above'})"


def _against(plan: Plan, base: Plan) -> str:
    """The difference in length of a step in per cent, and the length for `base`, as text. "other unit" if the units
    differ (slots and milliseconds)."""
    if plan.time_unit != base.time_unit:
        return "other unit"
    length = period(base) or base.makespan
    return f"{overhead(plan, base):+z.1%} ({number(length)} {base.time_unit})"


def _by_stage(values: Sequence[Any], show: Callable[[Any], str]) -> str:
    """The values as text: all for up to 16 stages, otherwise the extremes."""
    if len(values) <= 16:
        return " ".join(map(show, values))
    return f"{show(min(values))} to {show(max(values))}"


def recovery(chart: Chart) -> list[str]:
    """Sentences about a step with a death; none for other steps."""
    r = chart.recovery
    if not r:
        return []
    out = [
        f"{_names(r.workers)} died at {number(r.died)} {chart.unit}; "
        f"the stall was {number(r.stall)} {chart.unit}: "
        + ", ".join(f"{name} +{number(end - r.died)}" for name, _, end in r.spans())
    ]
    cut, lost = _ops_by_worker(chart, CUT), _ops_by_worker(chart, LOST)
    if cut:
        out.append("cut off: " + _listing(cut))
    if lost:
        out.append("lost with the dead workers: " + _listing(lost))
    again = _ops_by_worker(chart, REDONE)
    out.append(f"redone: {plural(redone(chart.plan), 'op')}" + (f", by {_listing(again)}" if again else ""))
    return out


def _ops_by_worker(chart: Chart, bit: int) -> dict[Worker, list[str]]:
    found: dict[Worker, list[str]] = {}
    for op in np.flatnonzero(chart.marks & bit):
        found.setdefault(chart.workers[chart.row[op]], []).append(chart.name(int(op)))
    return found


def _listing(ops: dict[Worker, list[str]], most: int = 12) -> str:
    shown = [f"{worker} ({names(of, most, ' ')})" for worker, of in list(ops.items())[:most]]
    rest = f" and {plural(len(ops) - most, 'more worker')}" if len(ops) > most else ""
    return "; ".join(shown) + rest


def _names(workers: Sequence[Worker]) -> str:
    return " and ".join(f"W({w.pipeline},{w.stage})" for w in workers) or "a worker"


def number(x: float) -> str:
    """A number as text: four significant digits below 10,000, else a whole number."""
    return f"{x:.4g}" if abs(x) < 1e4 else f"{x:,.0f}"


def percent(x: float) -> str:
    return f"{x:z.1%}"
