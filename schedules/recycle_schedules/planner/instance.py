"""A Problem as flat integer arrays, the input of the compiled loops.

    x = Instance.of(problem)
    x.ticks                       # ticks per time unit; all times in the loops are whole ticks, so ties are exact

Node g * P + s is micro-batch g at stage s. Worker d * P + s is W(d, s).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..graph import StageGraph
from ..horizon import LONGEST, horizon
from ..op_kinds import KINDS, O
from ..problem import Problem
from ..progress import NEED_ALL, NEEDS, SENT_B, SENT_F


@dataclass(frozen=True, eq=False)
class Instance:
    """The arrays of a problem. Shapes: N micro-batches, n = N * P nodes, w = D * P workers. Entries of dead workers are
    unused."""

    problem: Problem
    ticks: int
    pipeline: np.ndarray  # (N,) int32: pipeline of micro-batch g
    index: np.ndarray  # (N,) int32: index within its pipeline
    alive: np.ndarray  # (w,) bool
    duration: np.ndarray  # (5, w) int64, by code of the kind
    cap: np.ndarray  # (w,) float64: maximum number of micro-batches in flight
    held: np.ndarray  # (w,) float64: micro-batches in flight at time 0
    release: np.ndarray  # (w,) int64: earliest start of any op
    allreduce: np.ndarray  # (P,) int64
    travel: np.ndarray  # (1, 2) or (w, D) int64: message times, in the format of `compiled.timing.travel_time`
    todo: np.ndarray  # (n,) uint8: NEED_* bits; 0 for finished stages
    sent: np.ndarray  # (n,) uint8: SENT_* bits: the tensors that are available from time 0
    host: np.ndarray  # (n,) int64: the worker that must run the node, -1 if there is a choice

    @property
    def stages(self) -> int:
        return self.problem.stages

    @property
    def anywhere_alike(self) -> bool:
        """Whether every message takes the same time."""
        return self.problem.graph.uniform and self.travel[0, 0] == self.travel[0, 1]

    @property
    def size(self) -> int:
        """Approximate number of ops to schedule: three per open node, at least 1."""
        return 3 * int((self.todo > 0).sum()) or 1

    @cached_property
    def stepping(self) -> np.ndarray:
        """Indices of the live workers of unfinished stages."""
        w = np.flatnonzero(self.alive)
        return w[~np.isin(w % self.stages, list(self.problem.finished))]

    @cached_property
    def tail(self) -> np.ndarray:
        """(w,) int64: time from the end of the stage's last gradient to the end of the worker's optimizer step, without
        waiting for other stages. With a barrier, every worker's O counts as the longest O."""
        step = np.where(self.alive, self.duration[O], 0)
        if self.problem.optimizer == "none":
            return np.zeros_like(step)
        if self.problem.optimizer == "barrier":
            step = np.full_like(step, step.max(initial=0))
        return step + np.tile(self.allreduce, self.problem.pipelines)

    @classmethod
    def of(cls, problem: Problem, ticks: int | None = None) -> Instance:
        """The arrays of a problem. Delays are rounded up to whole ticks, durations to the nearest tick.

        ticks: ticks per time unit. None: `ticks_per_unit` of the problem."""
        p = problem
        D, P, N = p.pipelines, p.stages, p.total
        if ticks is None:
            ticks = ticks_per_unit(p)

        def up(t: Any) -> Any:
            """The delay t in ticks, rounded up so that it is never shortened."""
            return np.ceil(np.multiply(t, ticks) - 1e-6).astype(np.int64)

        alive = np.ones(D * P, dtype=bool)
        alive[[w.pipeline * P + w.stage for w in p.dead]] = False
        speed = np.ones(D * P)
        for w, x in p.speeds.items():
            speed[w.pipeline * P + w.stage] = x
        stage_times = np.array([p.per_stage(kind) for kind in KINDS])
        duration = np.rint(np.tile(stage_times, (1, D)) / speed * ticks).astype(np.int64)
        pipeline = np.repeat(np.arange(D, dtype=np.int32), p.counts)
        index = (np.arange(N) - p.first[pipeline]).astype(np.int32)
        own = pipeline[:, None] * P + np.arange(P, dtype=np.int32)[None, :]
        host = np.full((N, P), -1) if p.reroute == "any" else np.where(alive[own], own, -1)
        todo = np.full((N, P), NEED_ALL, dtype=np.uint8)
        sent = np.zeros((N, P), dtype=np.uint8)
        if p.remainder:
            of = p.progress
            host = np.where((of.host >= 0) & p.open, of.host * P + np.arange(P), host)
            for need, kinds in NEEDS:
                todo[(of.kinds & kinds) != 0] &= NEED_ALL ^ need
            sent |= of.sent
            todo[:, ~p.open], sent[:, ~p.open] = 0, SENT_F | SENT_B
        release = np.zeros(D * P, dtype=np.int64)
        for w, t in p.busy.items():
            release[w.pipeline * P + w.stage] = up(t)
        held = np.zeros(D * P)
        for w, x in p.held.items() if p.remainder else ():
            held[w.pipeline * P + w.stage] = x
        return cls(
            problem, ticks, pipeline, index, alive, duration, p.limits, held, release,
            np.array([up(t) for t in p.per_stage("allreduce")], dtype=np.int64),
            _travel(p.graph, up), todo.reshape(-1), sent.reshape(-1), host.reshape(-1).astype(np.int64),
        )  # fmt: skip


def _travel(graph: StageGraph, up: Callable[[Any], Any]) -> np.ndarray:
    """Message times in ticks, rounded up.

    (1, 2) if the graph is uniform: the time within a pipeline, and the time between two pipelines. Else (w, D): the
    time from worker w to each pipeline's worker of the next stage."""
    if graph.uniform:
        return np.array([[up(graph.near), up(graph.far)]], dtype=np.int64)
    p = graph.problem
    travel = np.zeros((p.pipelines, p.stages, p.pipelines), dtype=np.int64)
    travel[:, :-1] = up(graph.times).transpose(1, 0, 2)
    return travel.reshape(-1, p.pipelines)


def ticks_per_unit(p: Problem) -> int:
    """A power of ten, at least 10**7, such that the longest time in ticks has at least nine digits. Smaller if a
    schedule of the problem could otherwise take more than `LONGEST` ticks, but at least 1."""
    times = [t for kind in KINDS for t in p.per_stage(kind)] + [p.graph.slowest, *p.per_stage("allreduce")]
    longest = max(times, default=0.0) or 1.0
    most = sum(horizon(p, p.graph.links).values()) or 1.0
    digits = max(7, 8 - math.floor(math.log10(longest)))
    return 10 ** min(digits, math.floor(math.log10(LONGEST) - math.log10(most)))
