"""The figures of a planned or measured step. All commands use these definitions (docs/figures.md).

bubbles(plan).share, bubbles(plan).by_stage      # for a Plan or a Trace
lost(trace), redone(trace)                       # numbers of ops; 0 for a plan
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..op_kinds import COMPUTE, KINDS, OpKind
from ..plans import Plan
from ..trace import Trace

PARTS: dict[str, tuple[OpKind, ...]] = {kind: (kind,) for kind in COMPUTE}
PARTS[OpKind.BACKWARD] = (OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT)
"""Kind of a lost or redone op -> kinds of the ops that `lost` and `redone` count for it. A `B` counts as an `I` and a
`W`, because peers may split it. Any other op counts as itself."""


@dataclass(frozen=True)
class Bubbles:
    """The idle share of the live workers' time, in [0, 1].

    share: over all live workers. by_stage: over the live workers of each stage."""

    share: float
    by_stage: tuple[float, ...]

    @classmethod
    def of(cls, busy: np.ndarray, lived: np.ndarray) -> Bubbles:
        """The bubbles from two (D, P) float64 arrays. busy: time that each worker spent in ops. lived: time that each
        worker was alive."""
        stages = tuple(_idle(b, a) for b, a in zip(busy.sum(0).tolist(), lived.sum(0).tolist(), strict=True))
        return cls(_idle(float(busy.sum()), float(lived.sum())), stages)


def bubbles(plan: Plan) -> Bubbles:
    """The bubbles of a plan over its period, or of a trace or a remainder over its makespan.

    The time of a worker that dies counts until the end of its last op."""
    p, a = plan.problem, plan.arrays
    length = plan.makespan if isinstance(plan, Trace) or plan.period is None else plan.period
    origin = 0.0 if p.remainder or not len(a) else float(a.start.min())
    return bubbles_of(a.pipeline, a.stage, a.start - origin, a.end - origin, p.live, p.pipelines, length)


def bubbles_of(
    pipeline: np.ndarray,
    stage: np.ndarray,
    start: np.ndarray,
    end: np.ndarray,
    live: tuple[tuple[int, ...], ...],
    pipelines: int,
    length: float,
) -> Bubbles:
    """The bubbles of ops given as arrays (n,).

    start, end  times since the start of the step
    live        for every stage, the pipelines with a live worker
    pipelines   number of pipelines
    length      length of the step"""
    busy, lived = np.zeros((2, pipelines, len(live)))
    np.add.at(busy, (pipeline, stage), end - start)
    np.maximum.at(lived, (pipeline, stage), np.minimum(end, length))
    for s, of in enumerate(live):
        lived[list(of), s] = length
    return Bubbles.of(busy, lived)


def lost(plan: Plan) -> int:
    """Number of ops that live workers had to repeat, because the worker that finished them died in the same step."""
    return len(set(_again(plan)))


def redone(plan: Plan) -> int:
    """Number of repetitions of lost ops on live workers."""
    return len(_again(plan))


def _again(plan: Plan) -> list[tuple[OpKind, int, int]]:
    if not isinstance(plan, Trace):
        return []
    a = plan.arrays
    rows = np.flatnonzero(np.array(plan.status) == "redone")
    of = zip(a.kind[rows].tolist(), a.microbatch[rows].tolist(), a.stage[rows].tolist(), strict=True)
    return [(part, g, s) for kind, g, s in of for part in PARTS[KINDS[kind]]]


def _idle(busy: float, lived: float) -> float:
    return min(1.0, max(0.0, 1.0 - busy / lived)) if lived > 0 else 0.0
