"""Simulates a plan with durations or delays other than the planned ones.

    trace = simulate(plan, durations={"F": 1.1, "I": 1.0, "W": 0.9}, speed={"0,1": 0.8})

Every worker keeps the plan's order. Each op starts as soon as its worker and its inputs allow. Deterministic.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..op_kinds import O
from ..planner.instance import Instance
from ..planner.partial_schedule import PartialSchedule, finish
from ..planner.sequences import Sequences
from ..plans import Plan
from ..trace import Trace


def simulate(plan: Plan, **changes: Any) -> Trace:
    """The plan's ops in the same order, with the times that result from changed keys of its problem.

    changes: `durations`, `send`, `send_rerouted`, `links`, `allreduce`, `speed` or `busy_until`. Raises ValueError for
    other keys."""
    allowed = {"durations", "send", "send_rerouted", "links", "allreduce", "speed", "busy_until"}
    if set(changes) - allowed:
        raise ValueError(f"{sorted(set(changes) - allowed)[0]}: only {', '.join(sorted(allowed))} can be changed")
    problem = plan.problem.replace(**changes)
    x = Instance.of(problem)
    a = plan.arrays.take(plan.running_order())
    a = a.take(a.kind != O)
    node = a.microbatch.astype(np.int64) * problem.stages + a.stage
    host = np.where(x.host >= 0, x.host, 0)
    host[node] = a.pipeline.astype(np.int64) * problem.stages + a.stage
    order = PartialSchedule(node * 4 + a.kind, np.zeros(len(node), dtype=np.int64), host)
    timed = finish(x, Sequences.of(x, order).earliest(x), 0.0)
    return Trace(problem, timed.arrays, plan.lower_bound if not changes else 0.0, plan.time_unit)
