"""Converts measured seconds to milliseconds, which are easier to read: `in_milliseconds(trace)`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from recycle_schedules import KINDS, Plan, Trace


def in_milliseconds(plan: Plan) -> Plan:
    """The same plan or trace with all times multiplied by 1000, including the times in its problem."""
    a, p = plan.arrays, plan.problem
    problem = p.replace(
        durations={kind: [1e3 * x for x in p.per_stage(kind)] for kind in KINDS},  # including the defaults
        **{key: _scaled(getattr(p, key)) for key in ("send", "send_rerouted", "allreduce", "busy_until")},
    )
    if p.links is not None:
        problem = problem.replace(send=None, send_rerouted=None, links=_scaled_links(p.links))
    arrays = replace(a, start=a.start * 1e3, end=a.end * 1e3)
    out = replace(plan, problem=problem, arrays=arrays, lower_bound=plan.lower_bound * 1e3, time_unit="ms")
    return replace(out, phases=_scaled(out.phases)) if isinstance(out, Trace) else out


def _scaled(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {k: _scaled(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_scaled(v) for v in value]
    return value * 1e3


def _scaled_links(value: Any, key: str = "") -> Any:
    """The scaled value of the problem's key `links`: latencies are times, bandwidths bytes per time."""
    if isinstance(value, Mapping):
        return {k: _scaled_links(v, k) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_scaled_links(v) for v in value]
    return value * {"latency": 1e3, "bandwidth": 1e-3}[key] if key in ("latency", "bandwidth") else value
