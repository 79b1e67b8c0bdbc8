"""Traces of the steps around an event: the ops of every worker, with their times.

    traces.progress(worker, step, spans, running)   # recent ops and the current one, in case the worker dies
    traces.died(worker, at)              # adds the worker's completed ops and its interrupted op to the step
    traces.mark(step, recovery)          # keeps the traces of this step, the one before and the one after
    traces.layout = (9, 9, 6, 8)         # decoder layers of each stage, from the next commit on
    traces.committed(step, job)          # writes the traces that are complete
    traces.completed_by_dead(step)       # ops completed by workers that died in the step
    traces.bubbles, traces.redone        # figures of all steps so far (docs/figures.md)

`SpanTables` has the spans of live workers. A step's optimizer spans arrive with the spans of the next step, so a trace
is written one step late. `later` writes in a thread, because a trace of a thousand workers takes seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from recycle_schedules import KINDS, Op, OpArrays, OpKind, Problem, Trace, Worker
from recycle_schedules.analysis.figures import PARTS, bubbles_of
from recycle_schedules.layers import Layout
from recycle_schedules.op_kinds import COMPUTE

from recycle_pp.protocol.job import Job
from recycle_pp.protocol.live_problem import all_workers
from recycle_pp.timing.packing import listed, table_of
from recycle_pp.timing.span_tables import SpanTables

from .background import Later
from .guard import guarded
from .recovery import Part, Recovery
from .run_folder import RunFolder
from .running_median import RunningMedian

Span = list[Any]  # kind, pipeline, index, start, end; the times in seconds of the monotonic clock
Row = tuple[Worker, Span, str]  # the last is the status: done, cut (interrupted) or redone


class Traces:
    def __init__(self, run: RunFolder, later: Later, spans: SpanTables) -> None:
        self._run = run
        self._later = later
        self._spans = spans
        self.bubbles = RunningMedian()  # of all steps whose spans are known
        self.redone = 0  # number of redone ops
        self.layout: Layout | None = None  # None: unknown
        self._lost: dict[int, dict[Worker, list[Span]]] = {}  # step -> spans completed by workers that died in it
        self._cut: dict[int, dict[Worker, Span]] = {}
        self._progress: dict[Worker, tuple[int, list[Span], Span]] = {}
        self._problems: dict[int, Problem] = {}
        self._layouts: dict[int, Layout | None] = {}
        self._marked: dict[int, Recovery | None] = {}

    def progress(self, worker: Worker, step: int, spans: list[Span], running: Span) -> None:
        """Keeps the ops of a worker, in case it dies before the end of the step.

        spans    ops completed since the last call
        running  the current op: kind, pipeline, index, start"""
        before, done, _ = self._progress.get(worker, (step, [], []))
        self._progress[worker] = (step, done + spans if before == step else spans, running)

    def died(self, worker: Worker, at: float) -> None:
        if worker in self._progress:
            step, done, (kind, d, i, start) = self._progress.pop(worker)
            if self._spans.has(step, worker):
                return  # the worker had completed the step
            self._lost.setdefault(step, {})[worker] = done
            self._cut.setdefault(step, {})[worker] = [kind, d, i, start, max(at, start)]

    def completed_by_dead(self, step: int) -> set[Part]:
        return {
            (step, part, (d, i), w.stage)
            for w, spans in self._lost.get(step, {}).items()
            for kind, d, i, *_ in spans
            for part in PARTS.get(kind, ())
        }

    def mark(self, step: int, recovery: Recovery | None = None) -> None:
        self._marked[step] = self._marked.get(step) or recovery

    def committed(self, step: int, job: Job) -> None:
        live = set(job.workers.values())
        self._problems[step] = job.problem.replace(failed=sorted(all_workers(job.problem) - set(live)))
        self._layouts[step] = self.layout
        self._write(step - 1, job)
        for kept in (self._lost, self._cut, self._problems, self._layouts):
            for old in [k for k in kept if k < step - 1]:
                del kept[old]
        self._marked = {k: recovery for k, recovery in self._marked.items() if k > step - 3}

    def finish(self, job: Job) -> None:
        """Writes the trace of the last step, because no later step triggers it."""
        self._write(job.committed, job)

    def _again(self, step: int) -> frozenset[Part]:
        """Lost ops of this step, as counted by the recoveries in this step and in the previous one."""
        recoveries = (self._marked.get(step), self._marked.get(step - 1))
        return frozenset(part for r in recoveries if r for part in r.lost if part[0] == step)

    def _add_figures(self, step: int) -> None:
        spans, after = self._spans.of(step), self._spans.of(step + 1)
        steps = {w: t[t[:, 0] == OpKind.OPTIMIZER.code] for w, t in after.items()}
        lost = [(w, table_of(of)) for w, of in self._lost.get(step, {}).items()]
        cut = [(w, table_of([span])) for w, span in self._cut.get(step, {}).items()]
        self.bubbles.add(_bubbles(self._problems[step], [*spans.items(), *steps.items(), *lost, *cut]))
        again = self._again(step)
        if again:
            rows = ((w, *span[:3]) for w, t in spans.items() for span in listed(t))
            ran = ((step, part, (d, i), w.stage) for w, kind, d, i in rows for part in PARTS.get(kind, ()))
            self.redone += sum(part in again for part in ran)

    def _write(self, step: int, job: Job) -> None:
        if not self._spans.of(step) or step not in self._problems:
            return
        self._add_figures(step)
        if not {step - 1, step, step + 1} & self._marked.keys():
            return
        # The writing thread gets copies, because this thread may change the originals.
        recovery = self._marked.get(step)
        problem, layout = self._problems[step], self._layouts[step]
        generation = job.generation
        lost = dict(self._lost.get(step, {}))
        cut = dict(self._cut.get(step, {}))
        phases = dict(recovery.phases) if recovery else {}
        again = self._again(step)
        died = tuple(sorted(recovery.dead)) if recovery else ()

        def write(spans: Mapping[Worker, np.ndarray], after: Mapping[Worker, np.ndarray]) -> None:
            rows = _rows(step, {w: listed(t) for w, t in spans.items()}, lost, cut, again)
            rows += [(w, span, "done") for w, t in after.items() for span in listed(t) if span[0] == OpKind.OPTIMIZER]
            trace = _trace(problem, layout, generation, rows, phases, died)
            self._run.write_json(self._run.trace(step), trace.to_json(), indent=None)

        self._later(guarded(write), dict(self._spans.of(step)), dict(self._spans.of(step + 1)))


def _rows(
    step: int,
    spans: Mapping[Worker, list[Span]],
    lost: Mapping[Worker, list[Span]],
    cut: Mapping[Worker, Span],
    again: Collection[Part],
) -> list[Row]:
    """The compute ops of all workers, with their status."""

    def status(worker: Worker, kind: str, d: int, i: int) -> str:
        return "redone" if any((step, part, (d, i), worker.stage) in again for part in PARTS.get(kind, ())) else "done"

    rows = [(w, span, status(w, *span[:3])) for w, of in spans.items() for span in of]
    rows += [(w, span, "done") for w, of in lost.items() for span in of]
    rows += [(w, span, "cut") for w, span in cut.items()]
    return [row for row in rows if row[1][0] in COMPUTE]


def _trace(
    problem: Problem,
    layout: Layout | None,
    generation: int,
    rows: list[Row],
    phases: Mapping[str, float],
    died: tuple[Worker, ...],
) -> Trace:
    """The trace, with times relative to the first op."""
    origin = min(span[3] for _, span, _ in rows)
    ops = [
        Op(OpKind(k), None if k == OpKind.OPTIMIZER else (d, i), w.stage, w, start - origin, end - origin)
        for w, (k, d, i, start, end), _ in rows
    ]
    return Trace(
        problem,
        OpArrays.of(problem, ops),
        time_unit="s",
        layout=layout,
        generation=generation,
        status=tuple(status for _, _, status in rows),
        phases={name: at - origin for name, at in phases.items()},
        died=died,
    )


def _bubbles(problem: Problem, ops: Sequence[tuple[Worker, np.ndarray]]) -> float:
    """Share of bubbles in a step. ops: tables as `packing.unpack` returns them; a worker may have several."""
    table = np.concatenate([of for _, of in ops])
    workers = np.repeat([w for w, _ in ops], [len(of) for _, of in ops], axis=0)
    compute = table[:, 0] < len(KINDS)
    (start, end), (pipeline, stage) = table[compute, 3:5].T, workers[compute].T
    origin = start.min(initial=np.inf)
    length = float(np.ptp(table[compute, 3:5])) if compute.any() else 0.0
    of = (pipeline, stage, start - origin, end - origin)
    return bubbles_of(*of, problem.live, problem.pipelines, length).share
