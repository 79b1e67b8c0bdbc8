"""The check of a user's optimizer names the first promise that it breaks."""

import pytest
import torch

from recycle_pp.config.mistakes import UserMistake
from recycle_pp.numerics.update_rules.adamw import AdamW
from recycle_pp.numerics.update_rules.muon import Muon
from recycle_pp.numerics.update_rules.rule import UnitRule
from recycle_pp.testing.update_rules import check


class Momentum(UnitRule):
    vectors = ("momentum",)

    def __init__(self, settings):
        self.steps = 0

    def step(self, weight, grad, state, *, lr, decay, step):
        state["momentum"].lerp_(grad, 0.1)
        weight.sub_(state["momentum"], alpha=lr)


class Remembers(Momentum):
    def step(self, weight, grad, state, *, lr, decay, step):
        self.steps += 1
        weight.sub_(grad, alpha=lr / self.steps)


class Random(Momentum):
    def step(self, weight, grad, state, *, lr, decay, step):
        weight.sub_(torch.rand_like(grad), alpha=lr)


class Overwrites(Momentum):
    def step(self, weight, grad, state, *, lr, decay, step):
        weight.sub_(grad.mul_(lr))


class Frozen(Momentum):
    def step(self, weight, grad, state, *, lr, decay, step):
        if weight.dim() > 1:
            super().step(weight, grad, state, lr=lr, decay=decay, step=step)


class Taken(Momentum):
    vectors = ("model",)


class TakenByIslands(Momentum):
    vectors = ("residual",)


def mixed(settings):
    adamw, muon = AdamW(settings), Muon(settings)
    return lambda parameter: muon if len(parameter.shape) == 2 else adamw


def nothing(settings):
    return lambda parameter: None


@pytest.mark.parametrize("good", [f"{__name__}:Momentum", f"{__name__}:mixed", "examples.lion:Lion"])
def test_a_valid_rule_passes(good):
    check(good)


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (Remembers, "must keep nothing but its state vectors"),
        (Random, "a step must be deterministic"),
        (Overwrites, "a step changes its gradient"),
        (Frozen, "model layers.0.bias.* never changes"),
    ],
)
def test_a_broken_promise_is_named(bad, sentence):
    with pytest.raises(AssertionError, match=sentence):
        check(f"{__name__}:{bad.__name__}")


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        ("Taken", "a state vector must not be named 'model'"),
        ("TakenByIslands", "a state vector must not be named 'residual'"),
        ("nothing", "must return an UpdateRule for embedding"),
    ],
)
def test_a_build_that_returns_no_valid_rule_is_refused(bad, sentence):
    with pytest.raises(UserMistake, match=sentence):
        check(f"{__name__}:{bad}")
