"""Splits an update of neighbouring units into runs. One launch updates one run.

for run in runs_of(tensors, range(0, 40)):
    run.launch(parts(state, run.part), grad[run.part], lr=lr * run.lr, ...)
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from .hyperparameters import factors
from .layer_tensors import LayerTensors
from .update_rules.rule import Launch


@dataclass(frozen=True)
class Run:
    """Neighbouring units of one parameter group.

    part    slice of the run's elements in a vector of all units of the update
    launch  updates the run
    lr      factor by which the group multiplies the learning rate
    """

    part: slice
    launch: Launch
    lr: float


def runs_of(tensors: LayerTensors, units: range) -> list[Run]:
    """Splits neighbouring units of one update rule into as few runs as the parameter groups allow; without groups, into
    one run."""
    settings, layout, rule, runs = tensors.settings.optimizer, tensors.layout, tensors.rule_of(units[0]), []
    start = layout.spans[units[0]].start
    groups = groupby(units, key=lambda unit: factors(settings, layout.names[layout.units[unit].tensor]))
    for (lr, decay), found in groups:
        members = list(found)
        run = range(members[0], members[-1] + 1)
        span = layout.span(run)
        launch = rule.launch(layout.part(run), tensors.ops, tensors.device, settings.weight_decay * decay)
        runs.append(Run(slice(span.start - start, span.stop - start), launch, lr))
    return runs
