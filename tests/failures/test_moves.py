"""Layers move to other stages while a job trains, and no bit changes, whatever dies meanwhile.

With schedule.rebalance=always layers move whenever the new plan is shorter: after a death, and back after a return."""

import random

import pytest

from tests.recycle_pp.model.general import models

from .harness import Case, explain, fails, rejoins

slow = pytest.mark.slow
MOVING = ("model.layers=8", "model.split=null", "schedule.rebalance=always", "run.respawns=0")
SHARDED = ("parallel.sharded=true",)
GONE = fails("6:1.1@backward")
CASES = [
    Case("dies for good", "2x2", (*MOVING, *GONE), steps=100, bound=200),
    pytest.param(
        Case("returns", "2x2", (*MOVING, *SHARDED, *GONE, *rejoins("60:1.1")), steps=100, stagger=True), marks=slow
    ),
    pytest.param(Case("returns", "2x2", (*MOVING, *GONE, *rejoins("60:1.1")), steps=100), marks=slow),
    pytest.param(Case("dies for good", "2x2", (*MOVING, *GONE), steps=100, stagger=True), marks=slow),
    pytest.param(Case("dies for good", "2x2", (*MOVING, *SHARDED, *GONE), steps=100), marks=slow),
    pytest.param(Case("in bf16", "2x2", (*MOVING, *GONE, "numerics.precision=bf16"), steps=100), marks=slow),
]


def switches(outcome):
    return [event["layout"] for event in outcome.all("rebalanced")]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layers_move_after_a_death_and_back_after_a_return_and_no_bit_changes(case, runs):
    outcome = runs.of(case, "moved layers")
    runs.check_exact(outcome)
    assert switches(outcome), explain(outcome)


@slow
@pytest.mark.parametrize(
    ("kind", "more"), [("qwen2", ()), ("qwen2", SHARDED), ("gpt2", ())], ids=["qwen2", "sharded", "tied"]
)
def test_layers_of_a_hugging_face_model_move_there_and_back_and_no_bit_changes(kind, more, runs, tmp_path):
    folder = models.folder(kind, tmp_path, num_hidden_layers=8, n_layer=8, vocab_size=512)
    model = ("model=hf", f"model.path={folder}", "model.init=random", "model.sequence=16")
    overrides = (*model, *MOVING[1:], *more, *GONE, *rejoins("60:1.1"))
    outcome = runs.of(Case(f"a tiny {kind}", "2x2", overrides, steps=100, bound=200), "moved layers")
    runs.check_exact(outcome)
    assert "8 decoder layers may move" in outcome.output
    assert len(switches(outcome)) >= 2, explain(outcome)


@slow
@pytest.mark.parametrize("seed", range(20))
def test_random_deaths_and_returns_among_moves_change_no_bit(seed, runs):
    chance = random.Random(seed)
    step, fallen, back = 4, [], []
    for _ in range(5):
        worker = f"{chance.randrange(3)}.{chance.randrange(3)}"
        moment = chance.choice(["forward", "backward", "vote", "commit", "donate", "adopt", "regroup"])
        fallen.append(f"{step}:{worker}@{moment}")
        back.append(f"{step + chance.randrange(3, 8)}:{worker}")
        step += chance.randrange(2, 12)
    more = chance.choice([(), SHARDED])
    overrides = (*MOVING, *more, *fails(*fallen), *rejoins(*back))
    case = Case(
        f"seed {seed}", "2x2", overrides, steps=step + 16, stagger=chance.random() < 0.5, deaths=None, bound=200
    )
    outcome = runs.of(case, "moved layers")
    runs.check_exact(outcome)
