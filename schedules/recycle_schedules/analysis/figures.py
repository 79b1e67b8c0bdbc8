"""The figures of a step, planned or measured. Each has this one definition (docs/figures.md), in every command.

bubbles(plan).share, bubbles(plan).by_stage      # of a Plan or a Trace
lost(trace), redone(trace)                       # ops; 0 for a plan
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..ops import KINDS
from ..plans import Plan
from ..trace import Trace

PARTS = {"F": "F", "I": "I", "W": "W", "B": "IW"}
"""What counts as one lost or redone op: a backward in one piece counts as its two halves, since peers may split it."""


@dataclass(frozen=True)
class Bubbles:
    """share: of the live workers' time that goes by without an op. by_stage: of each stage's live workers alone."""

    share: float
    by_stage: tuple[float, ...]

    @classmethod
    def of(cls, busy: np.ndarray, lived: np.ndarray) -> Bubbles:
        """busy, lived: float64 (D, P), the time that each worker spent in ops, and that it was there for."""
        stages = tuple(_idle(b, a) for b, a in zip(busy.sum(0).tolist(), lived.sum(0).tolist(), strict=True))
        return cls(_idle(float(busy.sum()), float(lived.sum())), stages)


def bubbles(plan: Plan) -> Bubbles:
    """Over a plan's period, a trace's or a remainder's makespan. A worker that dies counts to its last op's end."""
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
    """Of ops as arrays (n,), times from the step's begin. live: the pipelines of every stage; length: the step's."""
    busy, lived = np.zeros((2, pipelines, len(live)))
    np.add.at(busy, (pipeline, stage), end - start)
    np.maximum.at(lived, (pipeline, stage), np.minimum(end, length))
    for s, of in enumerate(live):
        lived[list(of), s] = length
    return Bubbles.of(busy, lived)


def lost(plan: Plan) -> int:
    """Ops that ended on a worker which died in the same step, so that live workers had to run them again."""
    return len(set(_again(plan)))


def redone(plan: Plan) -> int:
    """Runs of lost ops on live workers."""
    return len(_again(plan))


def _again(plan: Plan) -> list[tuple[str, int, int]]:
    if not isinstance(plan, Trace):
        return []
    a = plan.arrays
    rows = np.flatnonzero(np.array(plan.status) == "redone")
    of = zip(a.kind[rows].tolist(), a.microbatch[rows].tolist(), a.stage[rows].tolist(), strict=True)
    return [(part, g, s) for kind, g, s in of for part in PARTS[KINDS[kind]]]


def _idle(busy: float, lived: float) -> float:
    return min(1.0, max(0.0, 1.0 - busy / lived)) if lived > 0 else 0.0
