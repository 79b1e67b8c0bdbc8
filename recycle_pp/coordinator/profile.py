"""The job's own durations, measured while it trains: what the planner plans with.

    profile = Profile(settings)
    for speed in profile.add({worker: table, ...}): ...       # who has become slow, or is so no more
    problem = profile.problem(problem)       # measured times, and a smaller share for workers that are slow

The first steps run I and W apart, the last of them runs B, so that all are measured; the very first is warm-up. From
then on plans use the medians, and every step is compared with them: a worker whose ops take `SLOW` times longer than
before in most of the last three steps, when the job as a whole does not, is planned with that speed, until it is as
fast as the others again. One bad step changes no plan, nor does a machine on which everybody slows down alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from recycle_schedules import Problem, Worker

from recycle_pp.config.settings import Settings
from recycle_pp.telemetry.packing import KINDS as SPANS
from recycle_pp.telemetry.packing import listed

from .latency_breakdown import Spans, gaps_of

KINDS = "FIWBO"
SLOW, NORMAL = 1.8, 1.3  # slow from this factor on, until it is below that one; 12 busy workers on 2 cores reach 1.7
AGAIN = 1.25  # a factor that changes less than this changes no plan


class Speed(NamedTuple):
    worker: Worker
    factor: float  # how many times longer its ops take than those of its peers; 1.0 when it is slow no more


class Profile:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        stages = range(settings.parallel.stages)
        self._steps = settings.schedule.profile_steps
        self._seen = 0
        self._before: Spans = {}
        self._seconds: dict[str, list[list[float]]] = {kind: [[] for _ in stages] for kind in KINDS}
        self._turns: list[float] = []
        self._messages: list[float] = []
        self._sums: list[list[float]] = [[] for _ in stages]
        self._first_forward: dict[Worker, float] = {}
        self._durations: dict[str, list[float]] = {}  # once the profile is complete
        self._lately: dict[Worker, deque[float]] = {}  # by how much its ops took longer in the last three steps
        self._factors: dict[Worker, float] = {}  # of the slow ones
        self._model: dict[int, tuple[int, float]] = {}  # what each stage's workers say of it

    @property
    def complete(self) -> bool:
        return bool(self._durations)

    def describe(self, stage: int, boundary_bytes: int, deferred_share: float) -> None:
        """What a worker says of its stage of the model: bytes over the boundary behind it, share of it that has a W."""
        self._model[stage] = boundary_bytes, deferred_share

    def add(self, tables: Mapping[Worker, np.ndarray]) -> list[Speed]:
        """The spans of a committed step, as `packing.unpack` gives them."""
        if self.complete:
            return self._compare(tables)
        if self._steps:
            self._collect({worker: listed(table) for worker, table in tables.items()})
            self._seen += 1
            if self._seen == self._steps:
                self._durations = self._medians()
        return []

    def seconds(self, worker: Worker, kind: str) -> float | None:
        """How long an op of this kind takes there; None as long as it is not measured."""
        if kind not in self._durations:
            return None
        return self._durations[kind][worker.stage] * self._factors.get(worker, 1.0)

    def problem(self, problem: Problem) -> Problem:
        """`problem` as the next step should be planned."""
        s = self._settings
        if self.complete:
            return problem.replace(
                backward=s.schedule.backward,
                durations=self._durations,
                send=_median(self._messages),
                allreduce=[_median(x) for x in self._sums],
                speed={f"{w.pipeline},{w.stage}": 1 / x for w, x in sorted(self._factors.items())},
                reroute="any" if self._factors else s.schedule.reroute,  # a slow worker's share goes to its peers
            )
        if s.emulate.mode or not self._steps:
            return problem
        return problem.replace(backward="coupled" if self._seen == self._steps - 1 > 0 else "decoupled")

    def to_json(self) -> dict[str, Any]:
        model = [self._model.get(stage, (None, None)) for stage in range(self._settings.parallel.stages)]
        return {
            "durations_seconds": self._durations,
            "turn_seconds": _median(self._turns),
            "message_seconds": _median(self._messages),
            "sum_seconds": [_median(x) for x in self._sums],
            "boundary_bytes": [boundary for boundary, _ in model[:-1]],
            "deferred_share": [share for _, share in model],
            "first_forward_seconds": {str(w): t for w, t in sorted(self._first_forward.items())},
            "steps": self._seen,
        }

    def take_up(self, data: Mapping[str, Any]) -> None:
        """What another coordinator has measured, from its `to_json`."""
        self._durations, self._seen = data["durations_seconds"], data["steps"]
        self._turns, self._messages = [data["turn_seconds"]], [data["message_seconds"]]
        self._sums = [[seconds] for seconds in data["sum_seconds"]]
        self._first_forward = {Worker.parse(w): seconds for w, seconds in data["first_forward_seconds"].items()}

    def _collect(self, spans: Spans) -> None:
        for worker, of in spans.items():
            for kind, _, _, start, end in of:
                if kind == "F" and worker not in self._first_forward:
                    self._first_forward[worker] = end - start
                elif kind in KINDS:
                    self._seconds[kind][worker.stage].append(end - start)
        if self._before:
            gaps = gaps_of(self._before, spans, barrier=not self._settings.optimizer.stagger)
            self._turns += gaps.turns
            self._messages += gaps.messages
            for stage, seconds in gaps.sums.items():
                self._sums[stage].append(seconds)
        self._before = spans

    def _medians(self) -> dict[str, list[float]]:
        """By stage, with the turn to the next op; B is I and W where it was never run, and emulated ops that never ran
        take what they are told to."""
        turn, emulate = _median(self._turns), self._settings.emulate
        told = {"F": emulate.F, "I": emulate.I, "W": emulate.W, "O": emulate.O} if emulate.mode else {}
        medians = {
            kind: [median(x) + turn if x else told.get(kind, 0.0) for x in self._seconds[kind]] for kind in KINDS
        }
        medians["B"] = [b or i + w for b, i, w in zip(medians["B"], medians["I"], medians["W"], strict=True)]
        return medians

    def _compare(self, tables: Mapping[Worker, np.ndarray]) -> list[Speed]:
        """Against the profile, and against the job's median: what all machines have in common is no worker's fault."""
        longer = {w: x for w, of in tables.items() if (x := self._longer(w, of)) is not None}
        usual = median(longer.values()) if longer else 1.0
        changed = []
        for worker, factor in longer.items():
            lately = self._lately.setdefault(worker, deque([1.0, 1.0], maxlen=3))
            lately.append(factor / usual)
            factor, known = median(lately), self._factors.get(worker, 1.0)
            if factor < (NORMAL if worker in self._factors else SLOW):
                factor = 1.0
            if not 1 / AGAIN < factor / known < AGAIN:
                changed.append(Speed(worker, factor))
        for worker, factor in changed:
            self._factors.pop(worker, None)
            if factor > 1.0:
                self._factors[worker] = factor
        return changed

    def _longer(self, worker: Worker, table: np.ndarray) -> float | None:
        known = np.array([self._durations[kind][worker.stage] if kind in "FIWB" else 0.0 for kind in SPANS])
        usual = known[table[:, 0].astype(int)]
        ops = usual > 0
        return float(np.median((table[ops, 4] - table[ops, 3]) / usual[ops])) if ops.any() else None


def _median(values: list[float]) -> float:
    return median(values) if values else 0.0
