"""Compares the ways to arrange a number of workers as D pipelines of P stages.

    table = shapes(settings, 4, 16e9, "cpu", microbatches=None)   # a Shape for 4x1, 2x2 and 1x4
    best(table)                                                   # the Shape with the shortest step after a death

By default, the number of micro-batches per pipeline is proportional to the number of stages, so a step has the same
number of micro-batches in every shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recycle_pp.config.settings import Settings

from .outlook import outlook

MICROBATCHES = 4  # per stage, in each pipeline; with P stages, bubbles are at most (P - 1) / 4P of a step


@dataclass(frozen=True)
class Shape:
    """D pipelines of P stages.

    period    duration of a step divided by its number of micro-batches; the unit is a forward of the whole model on
              one worker; None if the shape does not fit
    hit       the same if a worker of the worst stage is dead; None if it does not fit or the stage would be lost
    fullest   bytes on the fullest worker
    fits      whether all workers have room for a micro-batch in flight
    """

    pipelines: int
    stages: int
    microbatches: int
    period: float | None
    hit: float | None
    fullest: float
    fits: bool

    @property
    def text(self) -> str:
        return f"{self.pipelines}x{self.stages}"


def shapes(settings: Settings, workers: int, capacity: float, device: str, microbatches: int | None) -> list[Shape]:
    """All shapes of this number of workers that the model's number of layers allows, fewest stages first.

    settings      settings with one of the project's own models; others raise ValueError
    capacity      bytes of memory of a worker
    device        cpu or cuda
    microbatches  number per pipeline; None: `MICROBATCHES` times the number of stages
    """
    layers = settings.model.layers
    found = []
    for stages in range(1, workers + 1):
        if workers % stages == 0 and (not isinstance(layers, int) or stages <= layers):
            found.append(_shape(settings, workers // stages, stages, microbatches, capacity, device))
    return found


def best(table: Sequence[Shape]) -> Shape:
    """The shape with the shortest step after a death.

    If no shape survives a death, returns the one with the shortest step; if none fits, the one that needs the least
    memory.

    table: at least one shape
    """
    return min(table, key=lambda shape: (not shape.fits, shape.hit is None, shape.hit or shape.period or shape.fullest))


def _shape(
    settings: Settings, pipelines: int, stages: int, microbatches: int | None, capacity: float, device: str
) -> Shape:
    each = microbatches or MICROBATCHES * stages
    values = {
        "parallel.pipelines": pipelines,
        "parallel.stages": stages,
        "parallel.microbatches": each,
        "model.split": None,
        "schedule.profile_steps": 0,
    }
    whole, hit = outlook(settings.with_values(values), capacity, device, deaths=1)
    work = stages * pipelines * each
    return Shape(
        pipelines,
        stages,
        each,
        None if whole.period is None else whole.period / work,
        None if hit.period is None else hit.period / work,
        max(row.bytes for row in whole.rows),
        whole.fits,
    )
