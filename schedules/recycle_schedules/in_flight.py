"""How many micro-batches each worker holds, over time.

    level = in_flight(problem, arrays)     # after every change
    peaks(plan)                            # {worker: most micro-batches in flight}

A micro-batch is in flight from the start of its F to the end of its W (or B); `i_release` frees a share at the end of
its I.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .ops import B, F, I, W, Worker
from .plans import OpArrays, Plan
from .problem import Problem

EPS = 1e-9
"""Changes within this time of each other count as one instant: what is freed there is free for what begins there."""


@dataclass(frozen=True, eq=False)
class Changes:
    """Every change of a worker's count, worker by worker in the order of time; shapes (changes,)."""

    worker: np.ndarray  # d * P + s
    time: np.ndarray
    change: np.ndarray
    level: np.ndarray  # micro-batches in flight after it


def in_flight(p: Problem, a: OpArrays) -> Changes:
    """The changes of every worker; at one instant what ends comes before what begins."""
    gain = {F: 1.0, B: -1.0, W: p.i_release - 1.0} | ({I: -p.i_release} if p.i_release else {})
    ops = [(np.flatnonzero(a.kind == kind), x) for kind, x in gain.items()]
    worker = np.concatenate([a.pipeline[k].astype(np.int64) * p.stages + a.stage[k] for k, _ in ops])
    time = np.concatenate([(a.start if x > 0 else a.end)[k] for k, x in ops])
    change = np.concatenate([np.full(len(k), x) for k, x in ops])
    order = np.lexsort((time, worker))
    worker, time, change = worker[order], time[order], change[order]
    first = np.r_[True, worker[1:] != worker[:-1]][: len(worker)]
    instant = np.cumsum(np.r_[True, first[1:] | (time[1:] > time[:-1] + EPS)][: len(worker)])
    order = np.lexsort((change, instant))
    time, change = time[order], change[order]
    held = np.zeros(p.pipelines * p.stages)
    for w, x in p.held.items():
        held[w.pipeline * p.stages + w.stage] = x
    total = np.cumsum(change)
    head = np.flatnonzero(first)
    before = (total - change)[head]
    level = total - np.repeat(before, np.diff(np.r_[head, len(worker)])) + held[worker]
    return Changes(worker, time, change, level)


def peaks(plan: Plan) -> dict[Worker, float]:
    """The most micro-batches in flight on every live worker."""
    p = plan.problem
    x = in_flight(p, plan.arrays)
    top = np.zeros(p.pipelines * p.stages)
    for w, held in p.held.items():
        top[w.pipeline * p.stages + w.stage] = held
    np.maximum.at(top, x.worker, x.level)
    return {w: float(top[w.pipeline * p.stages + w.stage]) for w in p.workers()}
