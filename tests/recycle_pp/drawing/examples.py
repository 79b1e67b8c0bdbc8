"""Schedules to draw: the worked example, a recovered step, and a large plan computed by a formula."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from recycle_schedules import Op, OpArrays, OpKind, Plan, Problem, Trace, Worker

DEAD = Worker(1, 2)


def one_f_one_b(problem: Problem) -> Plan:
    """1F1B in every pipeline with F = I = W = 1 and B split into I and W. Computed by a formula, in milliseconds.

    The ops of a dead worker run last, on the next pipeline's worker.
    """
    D, P, M = problem.pipelines, problem.stages, int(problem.microbatches)  # type: ignore[call-overload]
    d, s, i = (x.ravel() for x in np.meshgrid(np.arange(D), np.arange(P), np.arange(M), indexing="ij"))
    back = P + 3 * i + 2 * (P - 1 - s)
    forward = np.where(i < P - s, s + i, back - 3 * (P - s) + 2)
    dead = np.isin(d * P + s, [w.pipeline * P + w.stage for w in problem.dead])
    last = 3 * (M + P)
    start = np.concatenate([forward, back, back + 1]) + np.tile(dead * last, 3)
    host = np.where(dead, (d + 1) % D, d)
    arrays = OpArrays(
        np.repeat(np.array([0, 1, 2], np.uint8), len(d)), np.tile(d * M + i, 3).astype(np.int32),
        np.tile(s, 3).astype(np.int16), np.tile(host, 3).astype(np.int16), start.astype(float), start + 1.0,
    )  # fmt: skip
    return Plan(problem, arrays)


def shape(failed: tuple[Worker, ...] = (), size: tuple[int, int, int] = (3, 4, 6), scale: float = 1.0) -> Problem:
    durations = {"F": scale, "I": scale, "W": scale, "O": 3 * scale}
    return Problem(*size, failed=failed, durations=durations, optimizer="none" if size != (3, 4, 6) else "staggered")


def recovered(death: float = 213.0, stall: float = 40.0) -> Trace:
    """1F1B in slots of 20 ms. W(1,2) dies at `death`; W(0,2) and W(2,2) take over, and all continue after `stall`."""
    slot, whole = 20.0, one_f_one_b(shape())
    ops: list[Op] = []
    status: list[str] = []
    lost: set[tuple[str, tuple[int, int] | None]] = set()

    def ran(op: Op, how: str) -> None:
        ops.append(op)
        status.append(how)

    for op in whole.ops:
        op = op._replace(start=op.start * slot, end=op.end * slot)
        if op.worker != DEAD:
            late = stall if op.start >= death else 0.0
            ran(op._replace(start=op.start + late, end=op.end + late), "done")
        elif op.start < death:
            ran(op._replace(end=min(op.end, death)), "done" if op.end <= death else "cut")
            if op.end <= death:
                lost.add((op.kind, op.microbatch))
    for i in range(6):
        host = Worker((0, 2)[i % 2], 2)
        for kind in "FIW":
            begin = max(op.end for op in ops if op.worker == host)
            ran(Op(OpKind(kind), (1, i), 2, host, begin, begin + slot), "redone" if (kind, (1, i)) in lost else "done")
    instants = ("died", 0.0), ("detected", 2.1), ("announced", 3.4), ("unblocked", 11.2), ("regrouped", 26.3)
    phases = {name: death + t for name, t in (*instants, ("planned", 30.1), ("resumed", stall))}
    problem = shape((DEAD,), scale=slot)
    return Trace(problem, OpArrays.of(problem, ops), 0.0, "ms", generation=1, status=tuple(status), phases=phases)


def run_folder(path: Path) -> Path:
    """A run folder with steps 19 to 21 and a death in step 20."""
    (path / "traces").mkdir(parents=True)
    for step, failed in ((19, ()), (21, (DEAD,))):
        plan = one_f_one_b(shape(failed))
        a = plan.arrays
        seconds = OpArrays(a.kind, a.microbatch, a.stage, a.pipeline, a.start * 0.02, a.end * 0.02)
        Trace(shape(failed, scale=0.02), seconds, 0.0, "s", generation=int(bool(failed))).save(
            path / f"traces/step-{step:06d}.json"
        )
    recovered().save(path / "traces/step-000020.json")
    (path / "metrics.jsonl").write_text('{"step": 21, "loss": 2.5, "tokens_per_second": 1000.0, "live_workers": 11}\n')
    return path
