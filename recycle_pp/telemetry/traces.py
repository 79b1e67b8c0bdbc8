"""Traces of the steps around an event: what every worker really did, and when.

    traces.progress(worker, message)     # what it has done lately and what it runs: all that is left of it if it dies
    traces.voted(worker, step, spans)    # everything it did in a step
    traces.died(worker, at)              # its last progress becomes part of the step: done ops and a cut one
    traces.mark(step, recovery)          # this step, the one before and the one after are worth keeping
    traces.committed(step, job)          # writes what is complete

A step's optimizer spans come with the votes of the next step, so a trace is written one step late.
"""

from __future__ import annotations

from typing import Any

from recycle_schedules import Op, OpArrays, Problem, Trace, Worker

from ..protocol.job import Job
from .recovery import Recovery
from .run_folder import RunFolder

Span = list[Any]  # kind, pipeline, index, start, end: seconds of the monotonic clock
COMPUTE = "FIWB"


class Traces:
    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._spans: dict[int, dict[Worker, list[Span]]] = {}  # what live workers did
        self._lost: dict[int, dict[Worker, list[Span]]] = {}  # what dead ones had done
        self._cut: dict[int, dict[Worker, Span]] = {}
        self._progress: dict[Worker, tuple[int, list[Span], Span]] = {}
        self._problems: dict[int, Problem] = {}
        self._marked: dict[int, Recovery | None] = {}

    def spans(self, step: int) -> dict[Worker, list[Span]]:
        return self._spans.get(step, {})

    def voted(self, worker: Worker, step: int, spans: list[Span]) -> None:
        self._spans.setdefault(step, {})[worker] = spans

    def progress(self, worker: Worker, message: dict[str, Any]) -> None:
        step, done, _ = self._progress.get(worker, (message["step"], [], []))
        done = done + message["spans"] if step == message["step"] else message["spans"]
        self._progress[worker] = (message["step"], done, message["running"])

    def died(self, worker: Worker, at: float) -> None:
        if worker in self._progress:
            step, done, (kind, d, i, start) = self._progress.pop(worker)
            if worker in self.spans(step):
                return  # it had done everything, and voted
            self._lost.setdefault(step, {})[worker] = done
            self._cut.setdefault(step, {})[worker] = [kind, d, i, start, max(at, start)]

    def mark(self, step: int, recovery: Recovery | None = None) -> None:
        self._marked[step] = self._marked.get(step) or recovery

    def committed(self, step: int, job: Job) -> None:
        self._problems[step] = job.problem.replace(failed=[w for w in _everybody(job) if w not in job.live])
        self._write(step - 1, job)
        for old in [k for k in self._spans if k < step - 1]:
            for kept in (self._spans, self._lost, self._cut, self._problems):
                kept.pop(old, None)

    def finish(self, job: Job) -> None:
        """The last step has no next one."""
        self._write(job.committed, job)

    def _write(self, step: int, job: Job) -> None:
        spans = self._spans.get(step)
        if not spans or step not in self._problems or not {step - 1, step, step + 1} & self._marked.keys():
            return
        recovery = self._marked.get(step)
        lost = self._lost.get(step, {})
        gone = {(k, d, i, w.stage) for w, of in lost.items() for k, d, i, _, _ in of}
        rows = [
            (w, span, "redone" if _again(w, span, gone, recovery) else "done") for w, of in spans.items() for span in of
        ]
        rows += [(w, span, "done") for w, of in lost.items() for span in of]
        rows += [(w, span, "cut") for w, span in self._cut.get(step, {}).items()]
        rows = [row for row in rows if row[1][0] in COMPUTE]
        rows += [(w, s, "done") for w, of in self._spans.get(step + 1, {}).items() for s in of if s[0] == "O"]
        origin = min(span[3] for _, span, _ in rows)
        ops = [
            Op(k, None if k == "O" else (d, i), w.stage, w, start - origin, end - origin)
            for w, (k, d, i, start, end), _ in rows
        ]
        problem = self._problems[step]
        trace = Trace(
            problem,
            OpArrays.of(problem, ops),
            time_unit="s",
            generation=job.generation,
            status=tuple(status for _, _, status in rows),
            phases={name: at - origin for name, at in recovery.phases.items()} if recovery else {},
        )
        self._run.write_json(self._run.trace(step), trace.to_json())


def _again(worker: Worker, span: Span, gone: set[tuple[str, int, int, int]], recovery: Recovery | None) -> bool:
    kind, d, i, _, _ = span
    output = ("F" if kind == "F" else "B", (d, i), worker.stage)
    return (kind, d, i, worker.stage) in gone or (recovery is not None and kind != "W" and output in recovery.lost)


def _everybody(job: Job) -> list[Worker]:
    return [Worker(d, s) for d in range(job.problem.pipelines) for s in range(job.problem.stages)]
