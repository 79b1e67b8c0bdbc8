"""A schedule while it is being made: ops as codes, times in ticks.

draft = Draft(codes, starts, host)
value(instance, draft)                 # what is minimised, in ticks
finish(instance, draft, bound)         # the Plan
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .instance import Instance
from .ops import O
from .plans import OpArrays, Plan
from .timing import NEVER


@dataclass(frozen=True, eq=False)
class Draft:
    """Ops as codes (node * 4 + kind) with their starts, both (n_ops,) int64 in a topological order; host (n,) int32."""

    codes: np.ndarray
    starts: np.ndarray
    host: np.ndarray


def value(x: Instance, draft: Draft) -> int:
    """What is minimised, in ticks."""
    ends, ready, first = times(x, draft)
    w = np.flatnonzero(x.alive)
    w = w[~np.isin(w % x.stages, list(x.problem.finished))]
    step = ready[w % x.stages]
    if x.problem.optimizer != "none":
        step = np.maximum(step, x.release[w]) + x.duration[4, w]
    if x.problem.optimizer == "staggered" and not x.problem.remainder:
        busy = first[w] < NEVER
        return int((step - first[w])[busy].max()) if busy.any() else int(step.max())
    return int(max(step.max(initial=0), ends.max(initial=0)))


def stage_ends(x: Instance, draft: Draft) -> np.ndarray:
    """(P,) int64: end of each stage's last gradient, 0 where it has none."""
    kind, node = draft.codes & 3, draft.codes >> 2
    gradient = kind >= 2
    ends = draft.starts[gradient] + x.duration[kind[gradient], draft.host[node[gradient]]]
    last = np.zeros(x.stages, dtype=np.int64)
    np.maximum.at(last, node[gradient] % x.stages, ends)
    return last


def times(x: Instance, draft: Draft) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ends of the ops; when each stage may step (P,); first start on each worker (w,)."""
    P, codes, starts = x.stages, draft.codes, draft.starts
    kind, node = codes & 3, codes >> 2
    worker = draft.host[node]
    ends = starts + x.duration[kind, worker]
    last = np.zeros(P, dtype=np.int64)
    gradient = kind >= 2
    np.maximum.at(last, (node % P)[gradient], ends[gradient])
    ready = last + x.allreduce
    if x.problem.optimizer == "none":
        ready = last
    elif x.problem.optimizer == "barrier":
        open_ = [s for s in range(P) if s not in x.problem.finished]
        ready = np.full(P, ready[open_].max(initial=0))
    first = np.full(len(x.cap), NEVER)
    np.minimum.at(first, worker, starts)
    return ends, ready, first


def finish(x: Instance, draft: Draft, bound: float) -> Plan:
    """A Plan from the loops' codes: ticks become times, optimizer steps are added."""
    P = x.stages
    codes, starts, host = draft.codes, draft.starts, draft.host
    ends, ready, _ = times(x, draft)
    node = codes >> 2
    rows = [
        (codes & 3).astype(np.uint8), (node // P).astype(np.int32), (node % P).astype(np.int16),
        (host[node] // P).astype(np.int16), starts, ends,
    ]  # fmt: skip
    if x.problem.optimizer != "none":
        w = np.flatnonzero(x.alive & ~np.isin(np.arange(len(x.alive)) % P, list(x.problem.finished)))
        begin = np.maximum(ready[w % P], x.release[w])
        steps = [
            np.full(len(w), O, np.uint8), np.full(len(w), -1, np.int32), (w % P).astype(np.int16),
            (w // P).astype(np.int16), begin, begin + x.duration[4, w],
        ]  # fmt: skip
        rows = [np.concatenate(pair) for pair in zip(rows, steps, strict=True)]
    kind, microbatch, stage, pipeline, start, end = rows
    arrays = OpArrays(kind, microbatch, stage, pipeline, start / x.ticks, end / x.ticks)
    return Plan(x.problem, arrays, bound)
