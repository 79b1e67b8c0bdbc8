"""Chooses the update rule of each parameter.

choose = choice(settings.optimizer)
rule = choose(Parameter("layers.3.ffn.w_down.weight", (64, 168), inside=True))
matrices, others = planned(settings.optimizer)      # for memory estimates
"""

from __future__ import annotations

from collections.abc import Callable

from recycle_pp.config.settings import Optimizer

from .adamw import AdamW
from .muon import Muon
from .rule import Parameter, UpdateRule

Choice = Callable[[Parameter], UpdateRule]


def choice(optimizer: Optimizer) -> Choice:
    """A function that returns the update rule of a parameter. With optimizer.name=muon this is Muon for matrices inside
    layers. In all other cases it is AdamW.

    For a custom optimizer, workers use `model.custom_rules` instead. The planner uses this function even then, so it
    assumes AdamW's memory.
    """
    adamw = AdamW(optimizer)
    if optimizer.name != "muon":
        return lambda parameter: adamw
    muon = Muon(optimizer)
    return lambda parameter: muon if parameter.inside and len(parameter.shape) == 2 else adamw


def planned(optimizer: Optimizer) -> tuple[UpdateRule, UpdateRule]:
    """(rule of the matrices inside layers, rule of all other parameters)."""
    choose = choice(optimizer)
    return choose(Parameter("", (1, 1), inside=True)), choose(Parameter("", (1,), inside=False))
