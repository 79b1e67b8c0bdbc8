"""An upper bound on the length of any schedule. The planner needs it because it counts ticks in 64-bit integers.

horizon(problem, links)           # {"durations": 324.0, "send": 12.0, ...}: one part for each key
sum(horizon(problem, links).values()) <= LONGEST
"""

from __future__ import annotations

from .layers import TIMES
from .links import Links
from .op_kinds import KINDS
from .problem_keys import ProblemKeys

LONGEST = 2.0**59
"""Largest allowed length of a schedule, in ticks and in the problem's unit. Half of the loops' value for "never"."""


def horizon(p: ProblemKeys, links: Links | None) -> dict[str, float]:
    """The time of all ops and messages, one after another, by the key that determines it.

    links: the problem's links; None if it has none."""
    micro_batches = max(1, p.total)
    if p.layers is None:
        key, ops = "durations", sum(sum(p.per_stage(kind)) for kind in KINDS)
    else:
        key, ops = "layers", 2 * sum(sum(p.layers.get(kind, ())) for kind in TIMES)  # twice, because B is I + W
    allreduce = p.allreduce if isinstance(p.allreduce, (list, tuple)) else [p.allreduce]
    message = p.send if links is None else links.slowest
    across = p.send if p.send_rerouted is None or not _reroutes(p) else p.send_rerouted
    messages = 2 * micro_batches * (p.stages - 1)
    slowest = min([1.0, *p.speeds.values()])
    return {
        key: micro_batches * ops,
        "speed": micro_batches * (ops / slowest - ops) if slowest < 1 else 0.0,
        "send" if links is None else "links": messages * message,
        "send_rerouted": messages * max(0.0, across - message),
        "allreduce": float(max(allreduce)),
        "busy_until": max(p.busy.values(), default=0.0),
    }


def _reroutes(p: ProblemKeys) -> bool:
    """Whether a micro-batch may leave its pipeline."""
    return bool(p.dead) or p.remainder or p.reroute == "any"
