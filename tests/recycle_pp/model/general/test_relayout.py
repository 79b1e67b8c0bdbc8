"""The layers of third-party models move between stages with the same bits as those of the project's own Transformer, or
the model says why they do not."""

import pytest

from recycle_pp.model.stage import Stage
from tests.recycle_pp.in_process import CPU
from tests.recycle_pp.model.general import models
from tests.recycle_pp.moving import MOVES, Pipeline, moves

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
    """gpt2 has a tied embedding, dropout and Conv1D. The experts of olmoe get their gradients in I. The own model has
    integer tensors between its stages."""
    changes = {"numerics__reproducible": True, "parallel__microbatches": 2}
    if kind == "own":
        config = models.of_function("Movable", **changes)
    else:
        config = models.of_folder(models.folder(kind, tmp_path, **FIVE), **changes)
    moves(Pipeline(config, [2, 2, 1], whole), Pipeline(config, [1, 2, 2], whole), MOVES[::3])


@pytest.mark.parametrize(
    ("build", "why"),
    [
        ("SkipsTwo", "no stage may start with blocks.1"),
        ("SharedLayer", "several layers share blocks.0"),
        ("Bare", "several layers share scales"),
        ("Activations", "blocks.1 has no parameters of its own"),
        ("Widening", "blocks.2 takes other tensors than blocks.1"),
    ],
)
def test_a_model_says_why_its_layers_cannot_move(build, why):
    stage = Stage(models.of_function(build), 0, CPU)
    assert why in stage.module.stays
    with pytest.raises(ValueError, match=why):
        stage.relayout([0, 1])
