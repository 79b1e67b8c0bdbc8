"""The time of an emulated op is proportional to its stage's share of the layers."""

import pytest

from recycle_pp.execution.emulate import EmulatedOptimizer, EmulatedStage
from tests.recycle_pp.in_process import CPU, gradient, small


@pytest.fixture
def first():
    """The first of two stages, which has three of four layers; its optimizer; and a list of the times of its ops."""
    config = small(
        model__layers=4, model__split=[3, 1], emulate__mode="sleep",
        emulate__F=1.0, emulate__I=2.0, emulate__W=4.0, emulate__O=8.0,
    )  # fmt: skip
    stage, times = EmulatedStage(config, 0, CPU), []
    stage._device.run = times.append
    return stage, EmulatedOptimizer(config, stage), times


def test_the_time_of_an_op_is_scaled_by_the_stages_share_of_layers(first):
    stage, optimizer, times = first
    stage.forward(0, 0)
    stage.backward_input(0)
    stage.backward_weight(0)
    stage.backward(1)
    optimizer.step(gradient(stage, 0), 0)
    assert times == [1.5, 3.0, 6.0, 9.0, 12.0]


def test_the_share_follows_layers_that_move(first):
    stage, optimizer, times = first
    optimizer.step(gradient(stage, 0), 0)
    beside = optimizer.beside(stage.arriving([3]))
    beside.follow(gradient(beside.tensors, 0), 0, 1.0)
    assert times == [12.0], "a follower takes no time of the stage's device"
    stage.relayout([-1, 0], [])
    optimizer.relayout([])
    stage.forward(1, 0)
    assert times == [12.0, 0.5]
