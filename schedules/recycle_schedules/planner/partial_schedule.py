"""The planner's working form of a schedule: ops as codes, times in ticks, without optimizer steps.

schedule = PartialSchedule(codes, starts, host)
value(instance, schedule)                 # the objective, in ticks
finish(instance, schedule, bound)         # the Plan
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..compiled import LOOPS
from ..compiled.timing import NEVER
from ..op_kinds import O
from ..plans import OpArrays, Plan
from .instance import Instance


@dataclass(frozen=True, eq=False)
class PartialSchedule:
    """The ops of a step except O.

    codes (n_ops,)   int64: node * 4 + kind, in a topological order
    starts (n_ops,)  int64: start times in ticks
    host (n,)        worker of each node"""

    codes: np.ndarray
    starts: np.ndarray
    host: np.ndarray


def value(x: Instance, schedule: PartialSchedule) -> int:
    """The planner's objective in ticks: the period of a staggered whole step, else the end of the last op."""
    last, first = times(x, schedule)
    w = x.stepping
    step = steps_from(x, last)[w % x.stages]
    if x.problem.optimizer != "none":
        step = np.maximum(step, x.release[w]) + x.duration[O, w]
    if x.problem.optimizer == "staggered" and not x.problem.remainder:
        return int(np.where(first[w] < NEVER, step - first[w], x.duration[O, w]).max())  # idle workers run only O
    return int(step.max(initial=0))


def times(x: Instance, schedule: PartialSchedule) -> tuple[np.ndarray, np.ndarray]:
    """Returns (last, first).

    last (P,): end of each stage's last gradient in ticks, 0 if there is none.
    first (w,): start of each worker's first op in ticks, NEVER if the worker is idle."""
    return LOOPS.stage_times(x.stages, schedule.host, x.duration, schedule.codes, schedule.starts)


def steps_from(x: Instance, last: np.ndarray) -> np.ndarray:
    """(P,): earliest start of each stage's optimizer step. last (P,): ends of the stages' last gradients."""
    if x.problem.optimizer == "none":
        return last
    ready = last + x.allreduce
    if x.problem.optimizer == "barrier":
        open_ = [s for s in range(x.stages) if s not in x.problem.finished]
        return np.full(x.stages, ready[open_].max(initial=0))
    return ready


def finish(x: Instance, schedule: PartialSchedule, bound: float) -> Plan:
    """The Plan of a schedule, with times in the problem's unit and optimizer steps. bound: the plan's `lower_bound`."""
    P = x.stages
    codes, starts, host = schedule.codes, schedule.starts, schedule.host
    ready = steps_from(x, times(x, schedule)[0])
    kind, node = codes & 3, codes >> 2
    rows = [
        kind.astype(np.uint8), (node // P).astype(np.int32), (node % P).astype(np.int16),
        (host[node] // P).astype(np.int16), starts, starts + x.duration[kind, host[node]],
    ]  # fmt: skip
    if x.problem.optimizer != "none":
        w = x.stepping
        begin = np.maximum(ready[w % P], x.release[w])
        steps = [
            np.full(len(w), O, np.uint8), np.full(len(w), -1, np.int32), (w % P).astype(np.int16),
            (w // P).astype(np.int16), begin, begin + x.duration[O, w],
        ]  # fmt: skip
        rows = [np.concatenate(pair) for pair in zip(rows, steps, strict=True)]
    kind, microbatch, stage, pipeline, start, end = rows
    arrays = OpArrays(kind, microbatch, stage, pipeline, start / x.ticks, end / x.ticks)
    return Plan(x.problem, arrays, bound)
