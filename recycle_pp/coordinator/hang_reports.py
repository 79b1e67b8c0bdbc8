"""Writes the activity of every worker, and the wait-for graph, to the folder `hangs` of the run.

reports = HangReports(state)
reports.add(step, signs, verdict)      # step-000020.json: adds a report about this step
reports.note(step, signs, verdict)     # now.json: the current activities, for `recycle_pp.doctor`
reports.stacks(worker, text)           # step-000020-1.2.txt: the stacks of a stuck worker
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from typing import Any

from recycle_schedules import Worker

from recycle_pp.protocol.hangs import Sign, Verdict
from recycle_pp.telemetry.checkpoint_folders import name
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.telemetry.warn import warn_once

from .state import JobState

NOTE_SECONDS = 1.0  # between two versions of now.json


class HangReports:
    def __init__(self, state: JobState) -> None:
        self._state = state
        self._reports: tuple[int, list[Any]] = (-1, [])  # step, reports of that step
        self._step = (-1, 0.0)  # (step in progress, time when it was first seen)
        self._noted = -math.inf  # time when now.json was last written

    def add(self, step: int, signs: Mapping[Worker, Sign], verdict: Verdict) -> None:
        before, reports = self._reports
        reports = [*(reports if before == step else []), self._report(step, signs, verdict)]
        self._reports = step, reports
        self._write(f"{name(step)}.json", json.dumps(reports, indent=1) + "\n")

    def note(self, step: int, signs: Mapping[Worker, Sign], verdict: Verdict) -> None:
        """Writes at most once every NOTE_SECONDS, and only if the step has lasted longer than `suspicion` / 4."""
        now = time.monotonic()
        if step != self._step[0]:
            self._step = step, now
        long = now - self._step[1] > self._state.settings.control.suspicion / 4
        if long and now - self._noted >= NOTE_SECONDS:
            self._noted = now
            self._write("now.json", json.dumps(self._report(step, signs, verdict), indent=1) + "\n")

    def stacks(self, worker: Worker, text: str) -> None:
        step, _ = self._reports
        self._write(f"{name(step)}-{worker}.txt", text)

    def path(self, step: int) -> str:
        return str(self._state.run.hangs / f"{name(step)}.json")

    def _report(self, step: int, signs: Mapping[Worker, Sign], verdict: Verdict) -> dict[str, Any]:
        """See `wire.records.HangReport`."""
        job, roster = self._state.job, self._state.roster
        hosts = {rank.role: rank.host for rank in roster}
        return {
            "time": time.time(),
            "step": step,
            "generation": job.generation,
            "missing": [str(worker) for member, worker in sorted(job.assignment.items()) if member not in roster],
            "stuck": {
                str(w): {**stuck._asdict(), "stacks": f"{name(step)}-{w}.txt"} for w, stuck in verdict.stuck.items()
            },
            "deadlock": [str(w) for w in verdict.deadlock],
            "no_disk": [str(w) for w in verdict.no_disk],
            "workers": {str(w): {"host": hosts.get(w), **sign.to_json()} for w, sign in sorted(signs.items())},
            "waits": [[str(a), str(b)] for a, b in verdict.graph.edges],
        }

    def _write(self, name: str, text: str) -> None:
        self._state.run.later(self._replace, name, text)

    def _replace(self, name: str, text: str) -> None:
        try:
            self._state.run.hangs.mkdir(exist_ok=True)
            RunFolder.write_text(self._state.run.hangs / name, text)
        except OSError as error:
            warn_once(f"{self._state.run.hangs} cannot be written: {error.strerror}")
