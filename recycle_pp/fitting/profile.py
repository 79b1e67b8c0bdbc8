"""Durations measured while the job trains, for the planner.

    profile = Profile(settings)
    for speed in profile.add({worker: table, ...}): ...       # workers that became slow or recovered
    problem = profile.problem(problem)       # with measured times, and the speeds of slow workers

Step 0 is warm-up. The other profiled steps run I and W separately, and the last one runs B, so that every kind of op is
measured. Later plans use the medians of the spans' `own`, which excludes the time in which the thread waited for a
core. So a busy machine changes no plan.

Each later step is compared with the medians, worker by worker. `slowness` decides which workers are slow; plans use
their speed until they recover. A worker that takes `FROM_THE_START` times as long as its peers in the profiled steps is
left out of the medians. Its later steps are compared with the medians of its peers.

Durations are those of a stage that does not recompute. If it recomputes, the problem adds an F to I and B.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
from recycle_schedules import KINDS, OpKind, Problem, Worker
from recycle_schedules.layers import TIMES
from recycle_schedules.op_kinds import COMPUTE, SPLIT

from recycle_pp.config.settings import Parallel, Settings
from recycle_pp.timing.packing import KINDS as SPANS
from recycle_pp.timing.packing import OWN

from .latency_breakdown import Spans, breakdown_of
from .link_table import LinkTable
from .problem import Measured
from .slowness import Slowness, Speed

MATTERS = 0.02  # share of the shortest op; message times below it change no plan
FROM_THE_START = 1.6  # on shared busy cores, medians of the first steps are 0.87 to 1.1 times those of peers


class Profile:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        stages = range(settings.parallel.stages)
        self._steps = settings.schedule.profile_steps
        self._seen = 0
        self._before: Spans = {}
        self._seconds: dict[str, list[list[float]]] = {kind: [[] for _ in stages] for kind in KINDS}
        self._turns: list[np.ndarray] = []
        self._turn = 0.0  # median of `_turns`, once the profile is complete
        self._messages: dict[tuple[Worker, Worker], list[np.ndarray]] = {}  # (from, to) -> seconds
        self._message = self._overhead = 0.0  # seconds of a message; the same without its time on the link
        self._sums: list[list[float]] = [[] for _ in stages]
        self._first_forward: dict[Worker, float] = {}
        self._durations: dict[str, list[float]] = {}  # by stage, once the profile is complete
        self._here: dict[Worker, dict[str, list[float]]] = {}  # worker -> kind -> seconds of its profiled ops
        self._usual: dict[Worker, dict[str, float]] = {}  # worker -> kind -> median, compared with later steps
        self._slowness = Slowness()
        self.links = LinkTable()
        self._memory: dict[int, Sequence[Mapping[str, float]]] = {}
        self._again: Sequence[bool] = [False for _ in stages]  # the stages that recompute, in the newest step
        self._model: dict[int, tuple[int, float]] = {}  # by stage: boundary bytes, deferred share

    @property
    def complete(self) -> bool:
        return bool(self._durations)

    def describe(
        self, stage: int, boundary_bytes: int, deferred_share: float, memory: Sequence[Mapping[str, float]] = ()
    ) -> None:
        """Records what a worker reports about its stage.

        boundary_bytes  output of the stage for one micro-batch
        deferred_share  share of the stage's parameters whose gradients `W` computes
        memory          measured bytes without and with recomputing; empty if they are computed from shapes
        """
        self._model[stage] = boundary_bytes, deferred_share
        if memory:
            self._memory[stage] = memory

    @property
    def memory(self) -> Measured | None:
        """The measured bytes of all stages; None while some are missing."""
        stages = range(self._settings.parallel.stages)
        return [self._memory[stage] for stage in stages] if len(self._memory) == len(stages) else None

    def place(self, worker: Worker, machine: str, cores: int) -> None:
        """Records the machine of a worker's new process. machine: host name of all workers that share its cores."""
        self._usual.pop(worker, None)  # the medians may be of another machine
        self._slowness.place(worker, machine, cores)
        self.links.place(worker, machine)

    def add(self, tables: Mapping[Worker, np.ndarray], again: Sequence[bool] | None = None) -> list[Speed]:
        """Takes the spans of a committed step. Returns the workers that became slow or recovered.

        tables: from `packing.unpack`
        again: for each stage, whether it recomputed in this step; None: as before
        """
        self._again = self._again if again is None else again
        if self.complete:
            return self._compare(tables)
        if self._steps:
            self._collect(tables)
            self._seen += 1
            if self._seen == self._steps:
                for worker, of in self._here.items():
                    if self._again[worker.stage] and OpKind.FORWARD in of:
                        _subtract_recomputing(of)
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
        """Seconds of an op of this kind on this worker; None before the profile is complete."""
        if kind not in self._durations:
            return None
        recomputes = self._again[worker.stage] and OpKind(kind).recomputes
        again = self._durations[OpKind.FORWARD][worker.stage] if recomputes else 0.0
        return (self._durations[kind][worker.stage] + again) * self._slowness.factors.get(worker, 1.0)

    def problem(self, problem: Problem) -> Problem:
        """The problem of the next step, with measured times. While times are measured, it has the kind of backward to
        measure next."""
        s = self._settings
        if self.complete:
            return problem.replace(
                backward=s.schedule.backward,
                durations=self._durations,
                **self._message_times(self._durations, s.parallel),
                allreduce=[_median(x) for x in self._sums],
                speed={f"{w.pipeline},{w.stage}": 1 / x for w, x in sorted(self._slowness.factors.items())},
                # peers take micro-batches of slow workers
                reroute="any" if self._slowness.factors else s.schedule.reroute,
            )
        if s.emulate.mode:
            return problem.replace(**self._message_times(problem.durations, s.parallel))
        if not self._steps:
            return problem
        return problem.replace(backward="coupled" if self._seen == self._steps - 1 > 0 else "decoupled")

    def _message_times(self, durations: Mapping[str, Any], parallel: Parallel) -> dict[str, Any]:
        """The problem's keys about messages: `links` if the links differ enough to change a plan, else `send`."""
        shortest = min((t for kind in SPLIT for t in np.ravel(durations.get(kind, 0.0)) if t > 0), default=0.0)
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
        """Whether this profile.json has the stages of this job."""
        stages = self._settings.parallel.stages
        durations, sums, sizes = data["durations_seconds"], data["sum_seconds"], data["boundary_bytes"]
        whole = set(durations) == set(KINDS) and all(len(of) == stages for of in (*durations.values(), sums))
        return whole and len(sizes) == stages - 1

    def load(self, data: Mapping[str, Any]) -> None:
        """Takes the figures of another coordinator, from its `to_json`."""
        self._durations = data["durations_seconds"]
        self._seen = data["steps"]
        self._turn = data["turn_seconds"]
        self._message = data["message_seconds"]
        self._overhead = data.get("overhead_seconds", 0.0)
        self.links.load(data.get("links", {}))
        for stage, size in enumerate(data["boundary_bytes"]):
            self._model.setdefault(stage, (size or 0, 0.0))
        self._sums = [[seconds] for seconds in data["sum_seconds"]]
        self._first_forward = {Worker.parse(w): seconds for w, seconds in data["first_forward_seconds"].items()}

    def _collect(self, spans: Spans) -> None:
        for worker, table in spans.items():
            here = self._here.setdefault(worker, {})
            for kind in KINDS:
                ops = table[table[:, 0] == SPANS.index(kind)]
                if kind is OpKind.FORWARD and len(ops) and worker not in self._first_forward:
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
        unexplained = [np.maximum(0.0, x - self._link_seconds(*pair)) for pair, x in times.items()]
        self._message = _median(_joined(times.values()))
        self._overhead = _median(_joined(unexplained))

    def _link_seconds(self, sender: Worker, receiver: Worker) -> float:
        """Seconds that a boundary tensor takes on its link; 0 if the link was not measured."""
        link = self.links.between(sender, receiver)
        first = min(sender.stage, receiver.stage)
        return link.time(self._model.get(first, (0, 0.0))[0]) if link else 0.0

    def _medians(self) -> dict[str, list[float]]:
        """Kind -> median seconds of an op at each stage, plus the turn: the time until the worker's next op starts.

        A `B` that never ran takes as long as `I` and `W`. Emulated ops that never ran have the durations of the
        settings.
        """
        emulate = self._settings.emulate
        emulated = {kind: getattr(emulate, kind) for kind in TIMES} if emulate.mode else {}
        medians: dict[str, list[float]] = {
            kind: [_median(x) + self._turn if x else emulated.get(kind, 0.0) for x in self._seconds[kind]]
            for kind in KINDS
        }
        parts = [medians[kind] for kind in (OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT)]
        medians[OpKind.BACKWARD] = [b or i + w for b, i, w in zip(*parts, strict=True)]
        return medians

    def _compare(self, tables: Mapping[Worker, np.ndarray]) -> list[Speed]:
        longer = {w: x for w, of in tables.items() if (x := self._longer(w, of)) is not None}
        return self._slowness.add(longer)

    def _longer(self, worker: Worker, table: np.ndarray) -> tuple[float, float] | None:
        """Own and wall time of a worker's ops in a step, as multiples of the sum of median times.

        The medians are those of this worker, or of its stage if the worker was not profiled. Returns None if no op has
        a median.
        """
        here = self._usual.get(worker, {})
        known = {k: here.get(k) or self._durations[k][worker.stage] if k in COMPUTE else 0.0 for k in SPANS}
        if self._again[worker.stage]:
            known |= {k: known[k] + known[OpKind.FORWARD] for k in COMPUTE if k.recomputes and known[k]}
        usual = np.array([known[k] for k in SPANS])[table[:, 0].astype(int)]
        ops = table[usual > 0]
        if not len(ops):
            return None
        total = usual.sum()
        return float(ops[:, OWN].sum() / total), float((ops[:, 4] - ops[:, 3]).sum() / total)


def _subtract_recomputing(seconds: dict[str, list[float]]) -> None:
    """Subtracts the time of recomputing, an `F`, from the times of a worker's `I` and `B`, in place."""
    forward = _median(seconds[OpKind.FORWARD])
    for kind in COMPUTE:
        if kind.recomputes and kind in seconds:
            seconds[kind] = [max(x - forward, x / 3) for x in seconds[kind]]


def _peers(here: Mapping[Worker, Mapping[str, float]], worker: Worker) -> dict[str, float]:
    """Kind -> the median over the other workers of the worker's stage."""
    others = [of for w, of in here.items() if w.stage == worker.stage and w != worker]
    return {kind: _median([of[kind] for of in others if kind in of]) for kind in {k for of in others for k in of}}


def _slower(of: Mapping[str, float], peers: Mapping[str, float]) -> bool:
    kinds = [kind for kind in SPLIT if kind in of and kind in peers]
    return sum(of[k] for k in kinds) > FROM_THE_START * sum(peers[k] for k in kinds)


def _joined(parts: Collection[np.ndarray]) -> np.ndarray:
    return np.concatenate([*parts, np.empty(0)])


def _median(values: Sequence[float] | np.ndarray) -> float:
    """The median; 0 without values. Python's median is ten times as fast for few values, numpy's for many."""
    if len(values) > 100:
        return float(np.median(values))
    return float(median(values)) if len(values) else 0.0
