"""The update rules of a user's own optimizer: `optimizer.name=custom optimizer.build=my_package:build`.

choose = custom_rules(settings.optimizer)       # None for other optimizers

`build` is a class or a function. It gets the settings of the optimizer (`config.settings.Optimizer`), and returns one
`UpdateRule` for all parameters, or a function that takes a `Parameter` and returns its `UpdateRule`.
"""

from __future__ import annotations

from recycle_pp.config.mistakes import UserMistake
from recycle_pp.config.settings import Optimizer
from recycle_pp.data.user_code import called, function
from recycle_pp.numerics.outer_state import MOMENTUM, RESIDUAL, THETA
from recycle_pp.numerics.update_rules.choice import Choice
from recycle_pp.numerics.update_rules.rule import Parameter, UpdateRule

TAKEN = {"model", "exponent", THETA, MOMENTUM, RESIDUAL}  # names in a checkpoint that a state vector must not use


def custom_rules(optimizer: Optimizer) -> Choice | None:
    """A function that returns the rule of a parameter; None if the optimizer is not custom.

    Raises ValueError if the user's module cannot be imported, and UserMistake if its code fails. The returned function
    raises UserMistake if it finds no valid rule."""
    if optimizer.name != "custom":
        return None
    assert optimizer.build is not None
    key = f"optimizer.build={optimizer.build}"
    build = function("optimizer.build", optimizer.build)
    with called(key):
        built = build(optimizer)

    def choose(parameter: Parameter) -> UpdateRule:
        if isinstance(built, UpdateRule):
            rule = built
        else:
            with called(key):
                rule = built(parameter)
        if not isinstance(rule, UpdateRule):
            raise UserMistake(f"{key} must return an UpdateRule for {parameter.name}, not a {type(rule).__name__}")
        for vector in rule.vectors:
            if vector in TAKEN or not vector.isidentifier():
                raise UserMistake(f"{key}: a state vector must not be named {vector!r}")
        return rule

    return choose
