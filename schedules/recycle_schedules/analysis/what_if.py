"""The cost of each possible next death: one row per live worker.

table = what_if(problem)
for row in table.rows: row.worker, row.period, row.slowdown, row.peak, row.bytes, row.fits
table.thinnest       # the stage with the fewest live workers
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..in_flight import peaks
from ..layers import Layout
from ..ops import Worker
from ..planner import plan, plan_layout
from ..plans import Plan
from ..problem import Problem


@dataclass(frozen=True)
class Row:
    """The step after the death of `worker`.

    period             duration of a step. None if no schedule exists: the stage has no other live worker, or its other
                       workers have no room for a micro-batch
    slowdown           increase of the period, as a share of the current period. None if no schedule exists
    peer               the live worker of the same stage with the highest peak of micro-batches in flight
    peak, limit        the peak of `peer`, and its limit (inf: none)
    bytes              the peak in bytes, None if the size of a micro-batch is unknown
    fits               whether a plan within the limits exists
    moved, moved_slowdown, layout   period, slowdown, and number of layers of each stage, if the stage boundaries move.
                       None if the problem has no layers. All figures above assume that the boundaries stay"""

    worker: Worker
    period: float | None
    slowdown: float | None
    peer: Worker | None
    peak: float | None
    limit: float
    bytes: float | None
    fits: bool
    moved: float | None = None
    moved_slowdown: float | None = None
    layout: Layout | None = None


@dataclass(frozen=True)
class Table:
    """The cost of the next death, for each live worker that could die."""

    now: Plan  # the current plan
    rows: list[Row]  # one per live worker
    thinnest: int  # the stage with the fewest live workers
    left: int  # live workers of the thinnest stage


def what_if(
    problem: Problem,
    *,
    seconds: float = 0.0,
    microbatch_bytes: float | None = None,
    capacity: float | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Table:
    """Plan the step after each possible death of one worker, and compare it with the current plan. If the problem has
    layers, also plan each of these steps with the stage boundaries moved.

    seconds            search time of each plan
    microbatch_bytes   bytes of activations of one micro-batch in flight
    capacity           bytes on a worker for activations; limits plans to capacity / microbatch_bytes micro-batches in
                       flight
    progress           called with (rows done, number of rows)

    Raises ValueError if one micro-batch does not fit into `capacity`."""
    if microbatch_bytes and capacity is not None:
        problem = _within(problem, int(capacity / microbatch_bytes))
    now = plan(problem, seconds=seconds) if problem.layers is None else plan_layout(problem, seconds=seconds)
    live = problem.workers()
    rows: list[Row] = []
    known: dict[object, tuple[Plan, Plan | None] | None] = {}
    for k, worker in enumerate(live):
        progress(k, len(live))
        key = _alike(problem, worker)
        if key not in known:
            after = _without(problem, worker)
            known[key] = None if after is None else _after(after, now, seconds)
        if (found := known[key]) is None:
            rows.append(Row(worker, None, None, None, None, problem.limit(worker), None, False))
        else:
            rows.append(_row(*found, now, worker, microbatch_bytes))
    progress(len(live), len(live))
    thinnest = min(range(problem.stages), key=lambda s: len(problem.live[s]))
    return Table(now, rows, thinnest, len(problem.live[thinnest]))


def _without(problem: Problem, worker: Worker) -> Problem | None:
    """The problem after the death of `worker`. None if it has no schedule."""
    try:
        return problem.replace(failed=[*problem.dead, worker])
    except ValueError:
        return None


def _after(problem: Problem, now: Plan, seconds: float) -> tuple[Plan, Plan | None]:
    """Returns (plan with the stage boundaries of `now`, plan with moved boundaries). The second is None if the problem
    has no layers."""
    if now.layout is None:
        return plan(problem, seconds=seconds), None
    return plan(problem.with_layout(now.layout), seconds=seconds), plan_layout(problem, seconds=seconds)


def _row(after: Plan, moved: Plan | None, now: Plan, worker: Worker, size: float | None) -> Row:
    top = {w: n for w, n in peaks(after).items() if w.stage == worker.stage}
    peer = max(top, key=lambda w: top[w])
    limit = after.problem.limit(peer)
    need = None if size is None else size * top[peer]
    row = Row(worker, after.value, _slowdown(after, now), peer, top[peer], limit, need, top[peer] <= limit + 1e-6)
    if moved is None:
        return row
    return replace(row, moved=moved.value, moved_slowdown=_slowdown(moved, now), layout=moved.layout)


def _slowdown(after: Plan, now: Plan) -> float:
    """The increase of the step's time, as a share of the current time."""
    return after.value / now.value - 1 if now.value else 0.0


def _within(p: Problem, most: int) -> Problem:
    """A copy of the problem with every limit capped at `most`. Raises ValueError if `most` is below 1."""
    if most < 1:
        raise ValueError("capacity: one micro-batch does not fit")
    limits = {f"{w.pipeline},{w.stage}": min(p.limit(w), most) for w in p.workers()}
    if len(set(limits.values())) == 1:
        return p.replace(memory_limit=next(iter(limits.values())))
    per_stage = [{limits[f"{d},{s}"] for d in p.live[s]} for s in range(p.stages)]
    if all(len(values) == 1 for values in per_stage):
        return p.replace(memory_limit=[values.pop() for values in per_stage])
    return p.replace(memory_limit={"per_worker": limits, "default": most})


def _alike(p: Problem, worker: Worker) -> object:
    """A cache key for the death of `worker`. If two deaths have equal keys, their plans differ only in the names of the
    pipelines."""
    special = {w.pipeline for w in (*p.dead, *p.speeds)}
    if worker.pipeline in special or not p.limits_alike or p.remainder or not p.graph.uniform:
        return worker
    return worker.stage, p.counts[worker.pipeline]
