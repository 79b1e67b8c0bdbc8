"""The job's own durations, measured while it trains: what the planner plans with.

    profile = Profile(settings)
    for speed in profile.add({worker: table, ...}): ...       # who has become slow, or is so no more
    problem = profile.problem(problem)       # measured times, and a smaller share for workers that are slow

The first steps run I and W apart, the last of them runs B, so that all are measured; the very first is warm-up. From
then on plans use the medians of what ops took on their device (a span's `own`: without what its thread waited for a
core, so that a busy machine changes no plan), and every step is compared with them, worker by worker. `slowness` says
who is slow; it is planned with that speed until it is as fast as the others again. Who takes `FROM_THE_START` times as
long as its peers while this is measured is compared with them, and is not part of the medians. Durations are those of
stages that keep what F computes: where one recomputes it, I and B take an F longer, which the problem adds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
from recycle_schedules import Problem, Worker

from recycle_pp.config.settings import Parallel, Settings
from recycle_pp.telemetry.packing import KINDS as SPANS
from recycle_pp.telemetry.packing import OWN

from .latency_breakdown import Spans, breakdown_of
from .link_table import LinkTable
from .problem import Measured
from .slowness import Slowness, Speed

KINDS = "FIWBO"
MATTERS = 0.02  # of the shortest op: what links differ by less changes no plan
FROM_THE_START = 1.6  # peers that share busy cores differ by 0.87 to 1.1 in the medians of the first steps


class Profile:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        stages = range(settings.parallel.stages)
        self._steps = settings.schedule.profile_steps
        self._seen = 0
        self._before: Spans = {}
        self._seconds: dict[str, list[list[float]]] = {kind: [[] for _ in stages] for kind in KINDS}
        self._turns: list[np.ndarray] = []
        self._turn = 0.0  # their median, once the profile is complete
        self._messages: dict[tuple[Worker, Worker], list[np.ndarray]] = {}  # seconds of those from one to the other
        self._message = self._overhead = 0.0  # seconds: of a message, and of it what its link does not explain
        self._sums: list[list[float]] = [[] for _ in stages]
        self._first_forward: dict[Worker, float] = {}
        self._durations: dict[str, list[float]] = {}  # once the profile is complete
        self._here: dict[Worker, dict[str, list[float]]] = {}  # the same seconds, by worker
        self._usual: dict[Worker, dict[str, float]] = {}  # and their medians
        self._slowness = Slowness()
        self.links = LinkTable()
        self._memory: dict[int, Sequence[Mapping[str, float]]] = {}
        self._again: Sequence[bool] = [False for _ in stages]  # the stages that recompute, in the newest step
        self._model: dict[int, tuple[int, float]] = {}  # what each stage's workers say of it

    @property
    def complete(self) -> bool:
        return bool(self._durations)

    def describe(
        self, stage: int, boundary_bytes: int, deferred_share: float, memory: Sequence[Mapping[str, float]] = ()
    ) -> None:
        """Bytes of the stage's output for one micro-batch; the share of its parameters whose gradients come with W; the
        bytes that it takes in each way in which it may run, where its workers measure them."""
        self._model[stage] = boundary_bytes, deferred_share
        if memory:
            self._memory[stage] = memory

    @property
    def memory(self) -> Measured | None:
        """By stage, what its workers have measured; None while some are missing."""
        stages = range(self._settings.parallel.stages)
        return [self._memory[stage] for stage in stages] if len(self._memory) == len(stages) else None

    def place(self, worker: Worker, machine: str, cores: int) -> None:
        """A process has started as this worker. machine: its host's name, the same for all that share its cores."""
        self._usual.pop(worker, None)  # measured on another one, perhaps
        self._slowness.place(worker, machine, cores)
        self.links.place(worker, machine)

    def add(self, tables: Mapping[Worker, np.ndarray], again: Sequence[bool] | None = None) -> list[Speed]:
        """The spans of a committed step, as `packing.unpack` gives them. again: the stages that recompute in it, where
        `model.recompute` leaves it to bytes; None: as before."""
        self._again = self._again if again is None else again
        if self.complete:
            return self._compare(tables)
        if self._steps:
            self._collect(tables)
            self._seen += 1
            if self._seen == self._steps:
                for worker, of in self._here.items():
                    if self._again[worker.stage] and "F" in of:
                        _keep(of)
                here = {w: {k: _median(x) for k, x in of.items()} for w, of in self._here.items()}
                peers = {w: _peers(here, w) for w in here}
                for worker, of in self._here.items():
                    if not _slower(here[worker], peers[worker]):
                        for kind, seconds in of.items():
                            self._seconds[kind][worker.stage] += seconds
                self._turn = _median(_joined(self._turns))
                self._durations = self._medians()
                self._set_message_times()
                self._usual = {w: peers[w] if _slower(of, peers[w]) else of for w, of in here.items()}
        return []

    def seconds(self, worker: Worker, kind: str) -> float | None:
        """How long an op of this kind takes there; None as long as it is not measured."""
        if kind not in self._durations:
            return None
        again = self._durations["F"][worker.stage] if self._again[worker.stage] and kind in "IB" else 0.0
        return (self._durations[kind][worker.stage] + again) * self._slowness.factors.get(worker, 1.0)

    def problem(self, problem: Problem) -> Problem:
        """`problem` as the next step should be planned."""
        s = self._settings
        if self.complete:
            return problem.replace(
                backward=s.schedule.backward,
                durations=self._durations,
                **self._message_times(self._durations, s.parallel),
                allreduce=[_median(x) for x in self._sums],
                speed={f"{w.pipeline},{w.stage}": 1 / x for w, x in sorted(self._slowness.factors.items())},
                reroute="any"
                if self._slowness.factors
                else s.schedule.reroute,  # a slow worker's share goes to its peers
            )
        if s.emulate.mode:
            return problem.replace(**self._message_times(problem.durations, s.parallel))
        if not self._steps:
            return problem
        return problem.replace(backward="coupled" if self._seen == self._steps - 1 > 0 else "decoupled")

    def _message_times(self, durations: Mapping[str, Any], parallel: Parallel) -> dict[str, Any]:
        """The problem's keys about messages: `links` where these differ by as much as a plan can tell."""
        shortest = min((t for kind in "FIW" for t in np.ravel(durations.get(kind, 0.0)) if t > 0), default=0.0)
        sizes = [self._model.get(stage, (0, 0.0))[0] for stage in range(parallel.stages - 1)]
        links = self.links.describe(parallel.pipelines, parallel.stages, sizes, self._overhead, MATTERS * shortest)
        return {"send": None, "links": links} if links else {"send": self._message, "links": None}

    def to_json(self) -> dict[str, Any]:
        model = [self._model.get(stage, (None, None)) for stage in range(self._settings.parallel.stages)]
        return {
            "durations_seconds": self._durations,
            "turn_seconds": self._turn,
            "message_seconds": self._message,
            "overhead_seconds": self._overhead,
            "links": self.links.to_json(),
            "sum_seconds": [_median(x) for x in self._sums],
            "boundary_bytes": [boundary for boundary, _ in model[:-1]],
            "deferred_share": [share for _, share in model],
            "memory": self.memory,
            "first_forward_seconds": {str(w): t for w, t in sorted(self._first_forward.items())},
            "steps": self._seen,
        }

    def fits(self, data: Mapping[str, Any]) -> bool:
        """Was this profile.json measured with as many stages as this job has?"""
        stages = self._settings.parallel.stages
        durations, sums, sizes = data["durations_seconds"], data["sum_seconds"], data["boundary_bytes"]
        whole = set(durations) == set(KINDS) and all(len(of) == stages for of in (*durations.values(), sums))
        return whole and len(sizes) == stages - 1

    def take_up(self, data: Mapping[str, Any]) -> None:
        """What another coordinator has measured, from its `to_json`."""
        self._durations, self._seen = data["durations_seconds"], data["steps"]
        self._turn, self._message = data["turn_seconds"], data["message_seconds"]
        self._overhead = data.get("overhead_seconds", 0.0)
        self.links.take_up(data.get("links", {}))
        for stage, size in enumerate(data["boundary_bytes"]):
            self._model.setdefault(stage, (size or 0, 0.0))
        self._sums = [[seconds] for seconds in data["sum_seconds"]]
        self._first_forward = {Worker.parse(w): seconds for w, seconds in data["first_forward_seconds"].items()}

    def _collect(self, spans: Spans) -> None:
        for worker, table in spans.items():
            here = self._here.setdefault(worker, {})
            for kind in KINDS:
                ops = table[table[:, 0] == SPANS.index(kind)]
                if kind == "F" and len(ops) and worker not in self._first_forward:
                    self._first_forward[worker] = float(ops[0, 4] - ops[0, 3])
                    ops = ops[1:]
                if len(ops):
                    here.setdefault(kind, []).extend(ops[:, OWN].tolist())
        if self._before:
            between = breakdown_of(self._before, spans, barrier=not self._settings.optimizer.stagger)
            self._turns.append(between.turns)
            for pair, times in between.messages.items():
                self._messages.setdefault(pair, []).append(times)
            for stage, seconds in between.sums.items():
                self._sums[stage].append(seconds)
        self._before = spans

    def _set_message_times(self) -> None:
        times = {pair: _joined(parts) for pair, parts in self._messages.items()}
        unexplained = [np.maximum(0.0, x - self._on_the_way(*pair)) for pair, x in times.items()]
        self._message, self._overhead = _median(_joined(times.values())), _median(_joined(unexplained))

    def _on_the_way(self, sender: Worker, receiver: Worker) -> float:
        """Seconds that a message's link takes, by what was measured; 0 where nothing was."""
        link = self.links.between(sender, receiver)
        first = min(sender.stage, receiver.stage)
        return link.time(self._model.get(first, (0, 0.0))[0]) if link else 0.0

    def _medians(self) -> dict[str, list[float]]:
        """By stage, with the turn to the next op; B is I and W where it was never run, and emulated ops that never ran
        take what they are told to."""
        emulate = self._settings.emulate
        told = {"F": emulate.F, "I": emulate.I, "W": emulate.W, "O": emulate.O} if emulate.mode else {}
        medians = {
            kind: [_median(x) + self._turn if x else told.get(kind, 0.0) for x in self._seconds[kind]] for kind in KINDS
        }
        medians["B"] = [b or i + w for b, i, w in zip(medians["B"], medians["I"], medians["W"], strict=True)]
        return medians

    def _compare(self, tables: Mapping[Worker, np.ndarray]) -> list[Speed]:
        longer = {w: x for w, of in tables.items() if (x := self._longer(w, of)) is not None}
        return self._slowness.add(longer)

    def _longer(self, worker: Worker, table: np.ndarray) -> tuple[float, float] | None:
        """Own and wall time of its ops in a step, by what they took in the first steps: here, else on its stage."""
        here = self._usual.get(worker, {})
        known = {k: here.get(k) or self._durations[k][worker.stage] if k in "FIWB" else 0.0 for k in SPANS}
        if self._again[worker.stage]:
            known |= {k: known[k] + known["F"] for k in "IB" if known[k]}
        usual = np.array([known[k] for k in SPANS])[table[:, 0].astype(int)]
        ops = table[usual > 0]
        if not len(ops):
            return None
        total = usual.sum()
        return float(ops[:, OWN].sum() / total), float((ops[:, 4] - ops[:, 3]).sum() / total)


def _keep(seconds: dict[str, list[float]]) -> None:
    """Of a worker that recomputed: what I and B would have taken without, in place."""
    forward = _median(seconds["F"])
    for kind in "IB":
        if kind in seconds:
            seconds[kind] = [max(x - forward, x / 3) for x in seconds[kind]]


def _peers(here: Mapping[Worker, Mapping[str, float]], worker: Worker) -> dict[str, float]:
    """Kind -> the median over the other workers of its stage; of none nothing."""
    others = [of for w, of in here.items() if w.stage == worker.stage and w != worker]
    return {kind: _median([of[kind] for of in others if kind in of]) for kind in {k for of in others for k in of}}


def _slower(of: Mapping[str, float], peers: Mapping[str, float]) -> bool:
    kinds = [kind for kind in "FIW" if kind in of and kind in peers]
    return sum(of[k] for k in kinds) > FROM_THE_START * sum(peers[k] for k in kinds)


def _joined(parts: Collection[np.ndarray]) -> np.ndarray:
    return np.concatenate([*parts, np.empty(0)])


def _median(values: Sequence[float] | np.ndarray) -> float:
    """0 of nothing. Of a few, Python's is ten times as fast as numpy's; of many it is the other way round."""
    if len(values) > 100:
        return float(np.median(values))
    return float(median(values)) if len(values) else 0.0
