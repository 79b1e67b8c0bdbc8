"""The number of micro-batches in flight on each worker over time.

    changes = in_flight(problem, arrays)   # every change of the number
    peaks(plan)                            # {worker: peak of the number}
    peak(plan, worker)                     # the peak on one live worker

A micro-batch is in flight from the start of its F to the end of its W (or B). After the end of its I it counts only as
`1 - i_release`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .op_kinds import COMPUTE, F
from .ops import Worker
from .plans import OpArrays, Plan
from .problem import Problem

EPS = 1e-9
"""Changes closer together than this, or than `tolerance`, count as simultaneous. An op that starts when another one
ends can use the memory that the other one frees."""


@dataclass(frozen=True, eq=False)
class Changes:
    """All changes of the number of micro-batches in flight, sorted by worker, then by time, as arrays (changes,)."""

    worker: np.ndarray  # d * P + s
    time: np.ndarray
    change: np.ndarray
    level: np.ndarray  # micro-batches in flight after the change


def in_flight(p: Problem, a: OpArrays) -> Changes:
    """The changes on every worker. Among simultaneous changes, ends come before starts."""
    gain = {F: 1.0} | {kind.code: -share for kind in COMPUTE if (share := kind.frees(p.i_release))}
    ops = [(np.flatnonzero(a.kind == code), x) for code, x in gain.items()]
    worker = np.concat([a.pipeline[k].astype(np.int64) * p.stages + a.stage[k] for k, _ in ops])
    time = np.concat([(a.start if x > 0 else a.end)[k] for k, x in ops])
    change = np.concat([np.full(len(k), x) for k, x in ops])
    order = np.lexsort((time, worker))
    worker, time, change = worker[order], time[order], change[order]
    first = np.concat(([True], worker[1:] != worker[:-1]))[: len(worker)]
    later = time[1:] > time[:-1] + tolerance(EPS, a)
    instant = np.cumsum(np.concat(([True], first[1:] | later))[: len(worker)])
    order = np.lexsort((change, instant))
    time, change = time[order], change[order]
    held = np.zeros(p.pipelines * p.stages)
    for w, x in p.held.items():
        held[w.pipeline * p.stages + w.stage] = x
    total = np.cumsum(change)
    head = np.flatnonzero(first)
    before = (total - change)[head]
    level = total - np.repeat(before, np.diff(np.concat((head, [len(worker)])))) + held[worker]
    return Changes(worker, time, change, level)


def tolerance(least: float, a: OpArrays) -> float:
    """The tolerance when comparing times of a schedule: `least`, or more if the schedule is so long that its times are
    rounded more coarsely."""
    return least * max(1.0, 1e-6 * float(np.abs(a.end).max(initial=0.0)))


def peaks(plan: Plan) -> dict[Worker, float]:
    """The peak number of micro-batches in flight on every live worker."""
    p = plan.problem
    x = in_flight(p, plan.arrays)
    top = np.zeros(p.pipelines * p.stages)
    for w, held in p.held.items():
        top[w.pipeline * p.stages + w.stage] = held
    np.maximum.at(top, x.worker, x.level)
    return {w: float(top[w.pipeline * p.stages + w.stage]) for w in p.workers()}


def peak(plan: Plan, worker: Worker) -> float:
    """The peak number of micro-batches in flight on one live worker."""
    a = plan.arrays
    mine = a.take((a.stage == worker.stage) & (a.pipeline == worker.pipeline))
    return float(in_flight(plan.problem, mine).level.max(initial=plan.problem.held.get(worker, 0.0)))
