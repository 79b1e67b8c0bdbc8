"""Layers move to other stages while a job trains, and no bit changes, whichever workers die in the meantime.

With schedule.rebalance=always layers move whenever the new plan is shorter: after a death, and back after a return.
Tests that expect a move disable measurements, so that the planner assumes equal times. On busy cores, the measured sums
of tiny stages take longer than their ops. Then re-routing looks as fast as a move.
"""

import random

import pytest

from tests.recycle_pp.model.general import models

from .harness import Case, SignalAt, explain, fails, rejoins

slow = pytest.mark.slow
MOVING = ("model.split=null", "schedule.rebalance=always", "run.respawns=0")
LAYERS, UNMEASURED = ("model.layers=8",), ("schedule.profile_steps=0",)
ALIKE = (*MOVING, *LAYERS, *UNMEASURED)
SHARDED = ("parallel.sharded=true",)
GONE = fails("6:1.1@backward")
BACK = rejoins("16:1.1")
CASES = [
    Case("dies for good", "2x2", (*ALIKE, *GONE), steps=16, bound=200),
    *(
        pytest.param(Case(claim, "2x2", (*ALIKE, *GONE, *more), steps=32, stagger=stagger, bound=200), marks=slow)
        for claim, more, stagger in (
            ("returns, sharded", (*SHARDED, *BACK), True),
            ("returns", BACK, False),
            ("dies for good", (), True),
            ("dies for good, sharded", SHARDED, False),
            ("in bf16", ("numerics.precision=bf16",), False),
        )
    ),
]


def hugging_face(kind, at, layers=8):
    folder = models.folder(kind, at, num_hidden_layers=layers, n_layer=layers, vocab_size=512)
    return ("model=hf", f"model.path={folder}", "model.init=random", "model.sequence=16")


def assert_moves(outcome):
    """Checks that layers moved away from stage 1, and back if its worker returned early enough."""
    first, *back = [event["layout"] for event in outcome.all("rebalanced")]
    assert first[0] > 4, explain(outcome)
    returns = [event["step"] for event in outcome.all("rejoined")]
    early = bool(returns) and returns[0] < outcome.case.steps - 10
    assert back == [[4, 4]] or (not early and back == []), explain(outcome)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layers_move_after_a_death_and_back_after_a_return_and_no_bit_changes(case, runs):
    outcome = runs.of(case, "moved layers")
    runs.check_exact(outcome)
    assert_moves(outcome)


@slow
@pytest.mark.parametrize(
    ("kind", "more"), [("qwen2", ()), ("qwen2", SHARDED), ("gpt2", ())], ids=["qwen2", "sharded", "tied"]
)
def test_layers_of_a_hugging_face_model_move_there_and_back_and_no_bit_changes(kind, more, runs, tmp_path):
    overrides = (*hugging_face(kind, tmp_path), *MOVING, *UNMEASURED, *more, *GONE, *BACK)
    outcome = runs.of(Case(f"a tiny {kind}", "2x2", overrides, steps=32, bound=200), "moved layers")
    runs.check_exact(outcome)
    assert "8 decoder layers may move" in outcome.output
    assert_moves(outcome)


@slow
def test_a_new_coordinator_knows_the_layers_of_a_hugging_face_model_and_moves_them_again(runs, tmp_path):
    """The node of W(0,0) is lost after layers have moved away from stage 1. Each stage then has one worker left."""
    overrides = (*hugging_face("qwen2", tmp_path), *MOVING, *UNMEASURED, *GONE)
    signals = (SignalAt("rebalanced", "0.0", supervisor=True),)
    outcome = runs.of(
        Case("the coordinator dies", "2x2", overrides, signals, steps=32, deaths=2, nodes=4, bound=200), "moved layers"
    )
    runs.check_exact(outcome)
    assert outcome.all("coordinator_elected")
    assert [event["layout"] for event in outcome.all("rebalanced")][1:] == [[4, 4]], explain(outcome)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    return hugging_face("qwen2", tmp_path_factory.mktemp("qwen2"), layers=16)


@slow
@pytest.mark.parametrize("seed", range(20))
def test_random_deaths_and_returns_among_moves_change_no_bit(seed, runs, qwen2):
    """The seed also selects sharding, stagger and measurement. Every fifth seed trains a Hugging Face model."""
    chance = random.Random(seed)
    fallen, back = [], []
    for step in sorted(chance.sample(range(4, 36), 5)):
        worker = f"{chance.randrange(3)}.{chance.randrange(4)}"
        moment = chance.choice(["forward", "backward", "vote", "commit", "donate", "adopt", "regroup"])
        fallen.append(f"{step}:{worker}@{moment}")
        back.append(f"{step + chance.randrange(6, 18)}:{worker}")  # a move begins about five steps after a death
    model = qwen2 if seed % 5 == 4 else ("model.layers=16",)
    more = (*SHARDED * (seed % 2), *UNMEASURED * (seed % 3 > 0))
    overrides = (*MOVING, *model, "checkpoint.every=4", *more, *fails(*fallen), *rejoins(*back))
    case = Case(f"seed {seed}", "3x4", overrides, steps=56, stagger=seed % 4 > 1, deaths=None, bound=300)
    outcome = runs.of(case, "moved layers")
    runs.check_exact(outcome)
    assert outcome.deaths and (outcome.all("rebalanced") or seed % 3 == 0), explain(outcome)
