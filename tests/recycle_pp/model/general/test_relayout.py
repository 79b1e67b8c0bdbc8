"""Layers of third-party models move between stages without changing a bit, or the model names the reason why not."""

import pytest

from recycle_pp.model.stage import Stage
from tests.recycle_pp.in_process import CPU
from tests.recycle_pp.model.general import models
from tests.recycle_pp.moving import MOVES, Pipeline, moves, takes_over

FIVE = {"num_hidden_layers": 5, "n_layer": 5}


@pytest.mark.parametrize(
    ("kind", "whole"),
    [
        ("own", False),
        ("gpt2", True),
        *(pytest.param("olmoe", whole, marks=pytest.mark.slow) for whole in (True, False)),
    ],
)
def test_layers_of_a_third_party_model_move_there_and_back(kind, whole, tmp_path):
    """gpt2 has a tied embedding, dropout and Conv1D. The experts of olmoe get their gradients in I. The custom model
    has integer tensors between its stages."""
    changes = {"numerics__reproducible": True, "parallel__microbatches": 2}
    if kind == "own":
        config = models.of_function("Movable", **changes)
    else:
        config = models.of_folder(models.folder(kind, tmp_path, **FIVE), **changes)
    moves(Pipeline(config, [2, 2, 1], whole), Pipeline(config, [1, 2, 2], whole), MOVES[::3])


@pytest.mark.parametrize(
    ("model", "whole", "understudy", "to"),
    [
        ("gpt2", True, 0, 2),
        ("Movable", False, 2, 0),
        ("SharedLayer", True, 0, 2),
        ("Bare", True, 2, 0),
        pytest.param("gpt2", False, 2, 0, marks=pytest.mark.slow),
    ],
)
def test_a_stage_of_a_third_party_model_becomes_another_stage(model, whole, understudy, to, tmp_path):
    """Layers of the last two models cannot move between stages, but a whole stage can."""
    changes = {"numerics__reproducible": True, "parallel__microbatches": 2}
    if model == "gpt2":
        config = models.of_folder(models.folder(model, tmp_path, **FIVE), **changes)
    else:
        config = models.of_function(model, **changes)
    split = {"Bare": [1, 1, 1], "SharedLayer": [1, 2, 1]}.get(model, [2, 1, 2])
    takes_over([Pipeline(config, split, whole) for _ in range(3)], understudy, to)


@pytest.mark.parametrize(
    ("build", "why"),
    [
        ("SkipsTwo", "no stage may start with blocks.1"),
        ("SharedLayer", "several layers share blocks.0"),
        ("Bare", "several layers share scales"),
        ("Activations", "blocks.1 has no parameters of its own"),
        ("Widening", "blocks.2 takes different tensors than blocks.1"),
    ],
)
def test_the_reason_why_layers_cannot_move_is_named(build, why):
    stage = Stage(models.of_function(build), 0, CPU)
    assert why in stage.module.stays
    with pytest.raises(ValueError, match=why):
        stage.relayout([0, 1])
