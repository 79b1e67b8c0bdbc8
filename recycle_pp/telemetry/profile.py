"""The job's own durations, measured in its first steps: what the planner plans with.

    profile = Profile(settings)
    profile.add(step, {worker: spans, ...})
    problem = profile.problem(problem, next_step)       # from `profile_steps` on: measured F, I, W, B, O

The first steps run I and W apart, the last of them runs B, so that all are measured; the very first is warm-up.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from recycle_schedules import Problem, Worker

from ..settings import Settings

KINDS = "FIWBO"


class Profile:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._steps = 0 if settings.emulate.mode else settings.schedule.profile_steps
        self._seen = 0
        self._seconds: dict[str, list[list[float]]] = {k: [[] for _ in range(settings.parallel.stages)] for k in KINDS}
        self._first_forward: dict[Worker, float] = {}
        self._done = False

    def add(self, step: int, spans: Mapping[Worker, list[Any]]) -> None:
        """The spans of a committed step."""
        if self._done or not self._steps:
            return
        self._seen += 1
        for worker, of in spans.items():
            for kind, _, _, start, end in of:
                if kind == "F" and worker not in self._first_forward:
                    self._first_forward[worker] = end - start
                elif kind in KINDS:
                    self._seconds[kind][worker.stage].append(end - start)

    def just_completed(self, step: int) -> bool:
        if self._done or not self._steps or self._seen < self._steps:
            return False
        self._done = True
        return True

    def problem(self, problem: Problem, next_step: int) -> Problem:
        """`problem` as it should be planned for the next step."""
        if not self._steps:
            return problem
        if self._done:
            return problem.replace(backward=self._settings.schedule.backward, durations=self._durations())
        mode = "coupled" if self._seen == self._steps - 1 and self._steps > 1 else "decoupled"
        return problem.replace(backward=mode)

    def to_json(self) -> dict[str, Any]:
        model, parallel = self._settings.model, self._settings.parallel
        return {
            "durations_seconds": self._durations(),
            "boundary_bytes": 4 * parallel.microbatch_size * model.sequence * model.width,
            "first_forward_seconds": {str(w): t for w, t in sorted(self._first_forward.items())},
            "steps": self._seen,
        }

    def _durations(self) -> dict[str, list[float]]:
        """Medians by stage; B is I and W where it was never run, and the other way round in equal parts."""
        medians = {k: [median(x) if x else 0.0 for x in by_stage] for k, by_stage in self._seconds.items()}
        medians["B"] = [b or i + w for b, i, w in zip(medians["B"], medians["I"], medians["W"], strict=True)]
        return medians
