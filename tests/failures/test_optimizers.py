"""Jobs with optimizers other than AdamW: after deaths the weights equal those of a single worker, bit for bit."""

import re

import pytest

from recycle_pp.numerics.update_rules.rule import UnitRule

from .harness import Case, fails, rejoins
from .test_moves import BACK, GONE, MOVING, UNMEASURED, assert_moves

slow = pytest.mark.slow
MUON = ("optimizer.name=muon",)
HALF = ("optimizer.moments=bf16",)
SHARDED = ("parallel.sharded=true", "checkpoint.every=4")
FAULTS = (*fails("2:0.1@backward", "5:1.0@allreduce"), *rejoins("4:0.1", "8:1.0"))


@pytest.mark.parametrize(
    ("more", "stagger"),
    [
        (SHARDED, False),
        pytest.param((), True, marks=slow),
        pytest.param(("numerics.precision=bf16", "numerics.sums=int32", *HALF, *SHARDED), True, marks=slow),
    ],
    ids=["sharded", "whole, staggered", "sharded, staggered, all in bf16"],
)
def test_deaths_and_returns_with_muon_change_no_bit(more, stagger, runs):
    case = Case("two die and return, with Muon", "3x2", (*MUON, *FAULTS, *more), steps=14, stagger=stagger, deaths=2)
    runs.check_exact(runs.of(case, "Muon"))


@slow
@pytest.mark.parametrize("more", [(), SHARDED], ids=["whole", "sharded"])
def test_deaths_and_returns_with_bf16_moments_change_no_bit(more, runs):
    case = Case("two die and return, bf16 moments", "3x2", (*HALF, *FAULTS, *more), steps=14, stagger=True, deaths=2)
    runs.check_exact(runs.of(case, "bf16 moments"))


def test_the_example_of_a_custom_optimizer_continues_after_a_death_and_no_bit_changes(runs):
    lion = ("optimizer.name=custom", "optimizer.build=examples.lion:Lion", "optimizer.lr=3e-4")
    runs.check_exact(runs.of(Case("Lion", "2x2", (*lion, *fails("3:1.1@backward"))), "own optimizer"))


def test_an_exception_in_a_step_of_a_custom_optimizer_is_shown_with_file_and_line_and_exits_with_2(zygote):
    own = ("optimizer.name=custom", f"optimizer.build={__name__}:Broken")
    with zygote.run(["model=tiny", "parallel=1x1", "run.steps=2", "run.validate_every=0", *own]) as job:
        assert job.wait(100) == 2, job.output
        assert re.search(r"ArithmeticError: no such step \(.*test_optimizers.py, line \d+, in step\)", job.output)


class Broken(UnitRule):
    vectors = ()

    def __init__(self, settings):
        pass

    def step(self, weight, grad, state, *, lr, decay, step):
        raise ArithmeticError("no such step")


@slow
@pytest.mark.parametrize("more", [HALF, SHARDED], ids=["whole, moments in bf16", "sharded"])
def test_layers_with_muon_move_there_and_back_and_no_bit_changes(more, runs):
    overrides = (*MUON, *MOVING, "model.layers=8", *UNMEASURED, *GONE, *BACK, *more)
    outcome = runs.of(Case("layers with Muon move", "2x2", overrides, steps=32, bound=200), "Muon")
    runs.check_exact(outcome)
    assert_moves(outcome)
