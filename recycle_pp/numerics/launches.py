"""The AdamW launches that update neighbouring units in one piece of memory.

for run in runs_of(settings.optimizer, gradients, ops, range(0, 40)):
    ops.adamw(parts(state, run.part), grad[run.part], run.places, run.settings, lr=lr * run.lr, ...)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from recycle_pp.config.settings import Optimizer

from .gradients import Gradients
from .hyperparameters import factors
from .operations import Operations


@dataclass(frozen=True)
class Run:
    """Neighbouring units of one parameter group. They occupy the elements `part` of a vector, and are updated with `lr`
    times the learning rate."""

    part: slice
    places: Any
    settings: Optimizer
    lr: float


def runs_of(settings: Optimizer, gradients: Gradients, ops: Operations, units: range) -> list[Run]:
    """Splits neighbouring units into as few runs as the parameter groups allow; without groups, into one run."""
    layout, runs = gradients.layout, []
    start = layout.spans[units[0]].start
    groups = groupby(units, key=lambda unit: factors(settings, layout.names[layout.units[unit].tensor]))
    for (lr, decay), found in groups:
        members = list(found)
        run = range(members[0], members[-1] + 1)
        span = layout.span(run)
        places = ops.places(layout.part(run), gradients.device)
        own = replace(settings, weight_decay=settings.weight_decay * decay)
        runs.append(Run(slice(span.start - start, span.stop - start), places, own, lr))
    return runs
