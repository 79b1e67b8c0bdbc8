"""Durations measured while the job trains, for the planner.

    profile = Profile(settings)
    for speed in profile.add({worker: table, ...}): ...       # workers that became slow or recovered
    problem = profile.problem(problem)       # with measured times, and the speeds of slow workers
    profile.relayout((9, 9, 6, 8))           # the new number of decoder layers of each stage

Each worker's first F is warm-up. The profiled steps run I and W separately, except for the last one, which runs B, so
that every kind of op is measured. Later plans use the medians of the spans' `own`, which excludes the time in which the
thread waited for a core, so a busy machine does not change plans.

Each later step is compared with the medians, worker by worker. `slowness` decides which workers are slow; plans use
their speed until they recover. A worker that takes much longer than its peers in the profiled steps is left out of the
medians (`measurement.py`). Its later steps are compared with the medians of its peers.

When layers move, the durations of the stages are predicted from those in the old layout (`layer_values.py`). After one
step of warm-up, the same number of steps is measured again, with whichever backward the plan uses. During this time no
worker is reported as slow or recovered.

Durations are those of a stage that does not recompute. If it recomputes, the problem adds an F to I and B.

The profile also carries to the next coordinator the history of the workers' outages (`move_policy.py`), and the first
steps of each worker (`drift.py`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from recycle_schedules import KINDS, OpKind, Problem, Worker
from recycle_schedules.layers import Layout
from recycle_schedules.op_kinds import COMPUTE, SPLIT

from recycle_pp.config.settings import Parallel, Settings
from recycle_pp.timing.packing import KINDS as SPANS
from recycle_pp.timing.packing import OWN

from .drift import First
from .layer_values import relaid
from .link_table import LinkTable
from .measurement import Measurement, Times, joined, median_of
from .move_policy import Outages
from .problem import Measured, initial_problem
from .slowness import FirstSteps, Slowness, Speed

MATTERS = 0.02  # message times below this share of the shortest op's duration change no plan
WARM_UP = 1  # number of steps after a move of layers that are not measured


class Profile:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._steps = settings.schedule.profile_steps
        self._warm: set[Worker] = set()  # workers that have run an F
        self._measuring: Measurement | None = self._measurement() if self._steps else None
        self.measured = 0  # number of completed measurements
        self.layout: Layout = ()  # the layout to which the durations belong; empty before the job has begun
        self._seen = 0  # number of steps in the last measurement
        self._turn = 0.0  # seconds between two ops, once the profile is complete
        self._message = self._overhead = 0.0  # seconds of a message, in total and beyond its time on the link
        self._sums = [0.0] * settings.parallel.stages
        self._durations: dict[str, list[float]] = {}  # by stage, once the profile is complete
        self._usual: dict[Worker, dict[str, float]] = {}  # worker -> kind -> median, compared with later steps
        self._slowness = Slowness()
        self._throttled: dict[Worker, float] = {}
        self.links = LinkTable()
        self.outages = Outages(settings.schedule.outage)
        self._memory: dict[int, Sequence[Mapping[str, float]]] = {}
        self._again: Sequence[bool] = [False] * settings.parallel.stages  # the stages that recompute
        self._model: dict[int, tuple[int, float]] = {}  # by stage: boundary bytes, deferred share

    @property
    def slow(self) -> dict[Worker, float]:
        """Slow workers and their factors (duration of an op as a multiple of the usual one).

        The factor is the larger of the measured one and the one estimated from the hardware's throttling report.
        """
        measured, reported = self._slowness.factors, self._throttled
        return {w: max(measured.get(w, 1.0), reported.get(w, 1.0)) for w in measured.keys() | reported.keys()}

    def throttle(self, factors: Mapping[Worker, float]) -> None:
        """Sets the workers whose hardware reports throttling, for all later problems.

        factors: worker -> estimated factor; 1.0: not throttled. Replaces the factors of the previous call.
        """
        self._throttled = {worker: factor for worker, factor in factors.items() if factor > 1.0}

    @property
    def learned(self) -> tuple[int, int]:
        """A value that `add` changes when profile.json should be written again."""
        return self.measured, self._slowness.learned

    @property
    def complete(self) -> bool:
        return bool(self._durations)

    def describe(
        self, stage: int, boundary_bytes: int, deferred_share: float, memory: Sequence[Mapping[str, float]] = ()
    ) -> None:
        """Records what a worker reports about its stage.

        boundary_bytes  bytes of the stage's output for one micro-batch
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
        """Records the machine of a worker's new process.

        machine  host name; workers with the same name share cores
        cores    number of cores of the machine
        """
        if not self._slowness.place(worker, machine, cores):
            self._usual.pop(worker, None)  # the medians were measured on another machine
        self.links.place(worker, machine)

    def add(self, tables: Mapping[Worker, np.ndarray], again: Sequence[bool] | None = None) -> list[Speed]:
        """Records the spans of a committed step. Returns the workers that became slow or recovered.

        tables  the spans of each worker, from `packing.unpack`
        again   for each stage, whether it recomputed in this step; None: as before
        """
        self._again = self._again if again is None else again
        if self._measuring is None:
            return self._compare(tables) if self.complete else []
        self._measuring.add(tables)
        if self._measuring.steps == self._steps:
            times = self._measuring.times(self._again, self._slowness.factors)
            self._seen, self._measuring = self._steps, None
            self.measured += 1
            if self.complete:
                self._correct(times)
            else:
                self._begin(times)
        return []

    def relayout(self, layout: Layout) -> None:
        """Predicts the durations of the stages in another layout, and starts to measure them again.

        No effect if it is the present layout.
        """
        before, self.layout = self.layout, layout
        if not before or before == layout:
            return
        old, counts = self._durations, (before, layout)
        self._durations = {kind: relaid(of, *counts) for kind, of in old.items()}
        self._sums = relaid(self._sums, *counts)
        for worker, usual in self._usual.items():
            for kind in usual:
                was = old[kind][worker.stage]
                usual[kind] *= self._durations[kind][worker.stage] / was if was else 1.0
        if self._steps:
            self._measuring = self._measurement(WARM_UP if self.complete else 0)

    def seconds(self, worker: Worker, kind: str) -> float | None:
        """Seconds of an op of this kind on this worker; None before the profile is complete."""
        if kind not in self._durations:
            return None
        recomputes = self._again[worker.stage] and OpKind(kind).recomputes
        again = self._durations[OpKind.FORWARD][worker.stage] if recomputes else 0.0
        return (self._durations[kind][worker.stage] + again) * self.slow.get(worker, 1.0)

    def sum_seconds(self, worker: Worker) -> float:
        """Seconds from the last gradient of this worker's stage to its optimizer step; 0 before the profile is
        complete."""
        return self._sums[worker.stage]

    def problem(self, problem: Problem) -> Problem:
        """The problem of the next step, with measured times.

        Until the profile is complete, only sets the kind of backward that is to be measured next, or the message times
        if compute is emulated.
        """
        s = self._settings
        if self.complete:
            return problem.replace(
                backward=s.schedule.backward,
                durations=self._durations,
                **self._message_times(self._durations, s.parallel),
                allreduce=self._sums,
                speed={f"{w.pipeline},{w.stage}": 1 / x for w, x in sorted(self.slow.items())},
                # with "any", peers take over micro-batches of slow workers
                reroute="any" if self.slow else s.schedule.reroute,
            )
        if s.emulate.mode:
            return problem.replace(**self._message_times(problem.durations, s.parallel))
        if self._measuring is None:
            return problem
        last = self._measuring.steps == self._steps - 1 > 0
        return problem.replace(backward="coupled" if last else "decoupled")

    def _message_times(self, durations: Mapping[str, Any], parallel: Parallel) -> dict[str, Any]:
        """The problem's keys for message times: `links` if the links differ enough to change a plan, else `send`."""
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
            "sum_seconds": self._sums,
            "boundary_bytes": [boundary for boundary, _ in model[:-1]],
            "deferred_share": [share for _, share in model],
            "memory": self.memory,
            "steps": self._seen,
            "layout": list(self.layout),
            "outages": self.outages.to_json(),
            "first_steps": {
                str(worker): {"machine": machine, "cores": cores, "usual_seconds": self._usual.get(worker, {})}
                | first._asdict()
                for worker, (machine, cores, first) in self._slowness.first_steps().items()
            },
        }

    def fits(self, data: Mapping[str, Any]) -> bool:
        """Whether this content of a profile.json has as many stages as this job."""
        stages = self._settings.parallel.stages
        durations, sums, sizes = data["durations_seconds"], data["sum_seconds"], data["boundary_bytes"]
        whole = set(durations) == set(KINDS) and all(len(of) == stages for of in (*durations.values(), sums))
        return whole and len(sizes) == stages - 1 and len(data.get("layout") or range(stages)) == stages

    def load(self, data: Mapping[str, Any]) -> None:
        """Continues with the measurements from another coordinator's `to_json`."""
        self._durations = data["durations_seconds"]
        self._seen, self._measuring = data["steps"], None
        self.layout = tuple(data.get("layout", ()))
        self._turn = data["turn_seconds"]
        self._message = data["message_seconds"]
        self._overhead = data.get("overhead_seconds", 0.0)
        self.links.load(data.get("links", {}))
        if "outages" in data:
            self.outages.load(data["outages"], time.monotonic())
        known = {Worker.parse(name): first for name, first in data.get("first_steps", {}).items()}
        self._usual = {worker: dict(first["usual_seconds"]) for worker, first in known.items()}
        self._slowness.load(
            {w: FirstSteps(of["machine"], of["cores"], First(of["own"], of["waits"])) for w, of in known.items()}
        )
        for stage, size in enumerate(data["boundary_bytes"]):
            self._model.setdefault(stage, (size or 0, 0.0))
        self._sums = list(data["sum_seconds"])

    def _measurement(self, skipped: int = 0) -> Measurement:
        return Measurement(not self._settings.optimizer.stagger, skipped, self._warm)

    def _begin(self, times: Times) -> None:
        """Stores the first measurement.

        Durations are medians plus the turn (the time until the worker's next op starts). A `B` that never ran takes as
        long as `I` and `W` together. Emulated ops that never ran have the durations of the settings.
        """
        self._turn, self._usual = times.turn, times.usual
        known = initial_problem(self._settings) if self._settings.emulate.mode else None
        for kind in KINDS:
            default = known.per_stage(kind) if known and kind in known.durations else (0.0,) * len(self._sums)
            self._durations[kind] = [times.ops[kind].get(s, t) for s, t in enumerate(default)]
        parts = [self._durations[kind] for kind in (OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT)]
        self._durations[OpKind.BACKWARD] = [b or i + w for b, i, w in zip(*parts, strict=True)]
        self._sums = [times.sums.get(s, 0.0) for s in range(len(self._sums))]
        unexplained = [np.maximum(0.0, x - self._link_seconds(*pair)) for pair, x in times.messages.items()]
        self._message = median_of(joined(times.messages.values()))
        self._overhead = median_of(joined(unexplained))

    def _correct(self, times: Times) -> None:
        """Stores a measurement after a move of layers. Durations of ops that did not run stay as predicted."""
        self._durations = {
            kind: [times.ops[OpKind(kind)].get(s, t) for s, t in enumerate(of)] for kind, of in self._durations.items()
        }
        self._sums = [times.sums.get(s, t) for s, t in enumerate(self._sums)]
        for worker, usual in times.usual.items():
            self._usual[worker] = self._usual.get(worker, {}) | usual

    def _link_seconds(self, sender: Worker, receiver: Worker) -> float:
        """Seconds that a boundary tensor takes on its link; 0 if the link was not measured."""
        link = self.links.between(sender, receiver)
        first = min(sender.stage, receiver.stage)
        return link.time(self._model.get(first, (0, 0.0))[0]) if link else 0.0

    def _compare(self, tables: Mapping[Worker, np.ndarray]) -> list[Speed]:
        longer = {w: x for w, of in tables.items() if (x := self._longer(w, of)) is not None}
        return self._slowness.add(longer)

    def _longer(self, worker: Worker, table: np.ndarray) -> tuple[float, float] | None:
        """The total (own, wall) time of a worker's ops in a step, as multiples of the sum of their median times.

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
