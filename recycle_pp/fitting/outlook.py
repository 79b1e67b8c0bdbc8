"""Predicts whether a job fits into the memory of its workers without deaths, after one death, and after two.

    found = outlook(settings, capacity=80e9, device="cuda")    # three Outcomes, with a row for each stage

Two deaths are assumed to hit the same stage, and every stage is tried. To keep the pipeline busy, stage s needs room
for the P - s micro-batches that 1F1B keeps in flight. With model.recompute=auto, a stage with less room runs whole
backwards (`B`). If that is not enough, it recomputes its layers, which costs one more F for each micro-batch. A run
decides in the same way, stage by stage. With model.recompute=false, a stage with less room keeps fewer micro-batches in
flight.

Durations are proportional to the number of multiplications. Periods therefore show the effect of memory and of deaths,
not the speed of a machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from recycle_schedules import Worker, plan
from recycle_schedules.memory import Mode, fastest, modes
from recycle_schedules.op_kinds import SPLIT, OpKind

from recycle_pp.config.settings import Settings
from recycle_pp.model.memory import (
    layers_of_stages,
    linear_sizes,
    parameters,
    room_for_tensors,
    stage_memory,
    weight_grad_sizes,
)

from .problem import initial_problem

DEATHS = ("no deaths", "one death", "two deaths")


@dataclass(frozen=True)
class Row:
    """The memory of one stage's workers.

    layers, parameters   numbers of layers and of parameters of the stage
    peers                live workers; 0: the stage is lost, and the job restarts from its newest checkpoint
    in_flight            largest number of micro-batches in flight on a worker, limited by its memory and by the
                         settings of `schedule`; 0: not even one fits
    wanted               the same, limited only by the settings of `schedule`
    whole                whether every backward is whole (`B`) rather than split
    recompute            whether the backward recomputes the layers
    parts                bytes of each part of the memory at the worker's peak
    """

    stage: int
    layers: int
    parameters: int
    peers: int
    in_flight: float
    wanted: float
    whole: bool
    recompute: bool
    parts: dict[str, float]

    @property
    def fits(self) -> bool:
        return self.in_flight >= 1

    @property
    def bytes(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Outcome:
    """The effect of a number of deaths at one stage.

    dead     number of dead workers, all of one stage
    rows     for each stage, the memory of its workers if all deaths are in this stage
    period   the duration of a step if the deaths are in the worst stage, as a multiple of an average stage's forward;
             None if a stage does not fit or is lost
    hit      the worst stage; None without deaths
    """

    dead: int
    rows: list[Row]
    period: float | None
    hit: int | None

    @property
    def fits(self) -> bool:
        return all(row.fits for row in self.rows)

    @property
    def name(self) -> str:
        return DEATHS[self.dead]


def outlook(settings: Settings, capacity: float, device: str, deaths: int = 2) -> list[Outcome]:
    """The outcomes with 0, 1, ... and `deaths` dead workers.

    capacity  bytes of memory of a worker
    device    cpu or cuda
    deaths    at most 2

    Raises ValueError if the model is not the project's own Transformer.
    """
    job = _Job(settings, capacity, device)
    return [job.outcome(dead) for dead in range(deaths + 1)]


def fits(settings: Settings, capacity: float, device: str, dead: int) -> bool:
    """Whether every stage has room for a micro-batch in flight after any number of deaths up to `dead` in that stage.
    Ignores a stage without live workers."""
    job = _Job(settings, capacity, device)
    return all(row.fits for n in range(dead + 1) for row in job.rows(n) if row.peers)


class _Job:
    def __init__(self, settings: Settings, capacity: float, device: str) -> None:
        if not settings.model.own:
            raise ValueError(
                f"model.kind={settings.model.kind}: the memory of its layers is known only while they run; for the "
                "Llama family, model=llama computes it"
            )
        self._settings = settings
        self._device = device
        self._capacity = room_for_tensors(capacity, device)
        self._problem = initial_problem(settings).replace(durations=None, memory=None)
        self._layers = layers_of_stages(settings)

    def outcome(self, dead: int) -> Outcome:
        rows = self.rows(dead)
        if not all(row.fits for row in rows):
            return Outcome(dead, rows, None, None)
        if not dead:
            return Outcome(dead, rows, self._period(rows, []), None)
        pipelines = self._settings.parallel.pipelines
        before = self.rows(0)
        periods = [
            self._period(
                [*before[: row.stage], row, *before[row.stage + 1 :]],
                [Worker(pipelines - 1 - k, row.stage) for k in range(dead)],
            )
            for row in rows
        ]
        worst = max(range(len(rows)), key=lambda s: periods[s])
        return Outcome(dead, rows, periods[worst], worst)

    def rows(self, dead: int) -> list[Row]:
        return [self._row(stage, self._settings.parallel.pipelines - dead) for stage in range(len(self._layers))]

    def _row(self, stage: int, peers: int) -> Row:
        model, p, layers = self._settings.model, self._settings.parallel, self._layers[stage]
        about = stage, len(layers), parameters(model, layers), max(0, peers)
        if peers < 1:
            return Row(*about, in_flight=0, wanted=0, whole=False, recompute=bool(model.recompute), parts={})
        ran = -(-p.pipelines * p.microbatches // peers)
        wanted = min(self._problem.limit(Worker(0, stage)), ran)
        enough = min(p.stages - stage, wanted)  # as many as 1F1B keeps in flight
        mode = fastest(self._modes[stage], self._capacity, peers, ran, enough)
        most = min(mode.memory.in_flight(self._capacity, peers, ran, mode.whole), wanted)
        parts = mode.memory.peak(peers, ran, max(1, most), mode.whole)
        return Row(*about, in_flight=most, wanted=wanted, whole=mode.whole, recompute=mode.recompute, parts=parts)

    @cached_property
    def _modes(self) -> list[list[Mode]]:
        """For each stage, the allowed ways to run its backward (split or whole, recomputed or not), fastest first."""
        backward = "coupled" if self._settings.schedule.backward == "coupled" else "mixed"
        chosen = self._settings.model.recompute
        found = []
        for stage in range(len(self._layers)):
            kept, again = (
                stage_memory(self._settings, stage, device=self._device, recompute=recompute)
                for recompute in (False, True)
            )
            if chosen is True:
                found.append([replace(each, recompute=True) for each in modes(again, again, backward)])
            else:
                found.append(modes(kept, again if chosen == "auto" else None, backward))
        return found

    def _period(self, rows: list[Row], failed: list[Worker]) -> float:
        forward, backward_input, backward_weight = (self._times[kind] for kind in SPLIT)
        again = [i + f * row.recompute for i, f, row in zip(backward_input, forward, rows, strict=True)]
        limits = [None if row.in_flight == math.inf else int(row.in_flight) for row in rows]
        whole = [row.stage for row in rows if row.whole]
        times = dict(zip(SPLIT, (forward, again, backward_weight), strict=True))
        problem = self._problem.replace(durations=times, memory_limit=limits, failed=failed, backward="mixed")
        return plan(problem.replace(whole=whole)).value

    @cached_property
    def _times(self) -> dict[str, list[float]]:
        """F, I and W of each stage, proportional to the multiplications in its matrices and its attention."""
        model = self._settings.model
        matrices = [float(sum(linear_sizes(model, layers))) for layers in self._layers]
        attention = [float(len(layers) * model.sequence * model.heads * model.head_size) for layers in self._layers]
        unit = sum(matrices + attention) / len(self._layers)
        return {
            OpKind.FORWARD: [(m + a) / unit for m, a in zip(matrices, attention, strict=True)],
            OpKind.BACKWARD_INPUT: [(m + 2 * a) / unit for m, a in zip(matrices, attention, strict=True)],
            OpKind.BACKWARD_WEIGHT: [sum(weight_grad_sizes(model, layers)) / unit for layers in self._layers],
        }
