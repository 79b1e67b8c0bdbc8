"""The state vectors that an island adds to each unit."""

import pytest
import torch

from recycle_pp.model.memory import stage_memory
from recycle_pp.model.stage import Stage
from recycle_pp.numerics.optimizer import StageOptimizer
from tests.recycle_pp.in_process import CPU, gradient, small

PLAIN = small(parallel__stages=1)


def optimizer_of(settings, whole=True):
    stage = Stage(settings, 0, CPU)
    optimizer = StageOptimizer(settings, stage, whole)
    if not whole:
        for unit in range(len(stage.layout.units)):
            optimizer.begin(unit)
    return stage, optimizer


def island(**words):
    return small(parallel__stages=1, islands__store="/nowhere", islands__name="a", **words)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("whole", [True, False])
def test_updates_have_the_bits_of_a_plain_job_and_leave_the_outer_vectors_alone(name, whole):
    stage, optimizer = optimizer_of(island(optimizer__name=name), whole)
    other, plain = optimizer_of(small(parallel__stages=1, optimizer__name=name), whole)
    start = {key: of.clone() for key, of in optimizer.outer(0).items()}
    assert torch.equal(start["theta"], start["model"]) and not start["residual"].any()
    for step in range(3):
        optimizer.step(gradient(stage, step), step)
        plain.step(gradient(other, step), step)
    assert torch.equal(stage.flat.joined(), other.flat.joined())
    for key, of in optimizer.outer(0).items():
        assert torch.equal(of, start[key]) == (key != "model"), key


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_replaced_masters_are_the_weights_of_the_next_step(precision):
    stage, optimizer = optimizer_of(island(numerics__precision=precision))
    theta = torch.full_like(optimizer.outer(1)["theta"], 0.1)
    optimizer.replace({1: {"theta": theta, "model": theta}})
    assert torch.equal(optimizer.outer(1)["model"], theta) and torch.equal(optimizer.outer(1)["theta"], theta)
    assert torch.equal(stage.working[stage.layout.spans[1]], theta.to(stage.working.dtype))


def test_checkpoints_and_copies_contain_the_outer_vectors():
    stage, optimizer = optimizer_of(island())
    optimizer.replace({0: {"theta": torch.ones_like(optimizer.outer(0)["theta"])}})
    other = StageOptimizer(island(), Stage(island(), 0, CPU))
    other.load(optimizer.state())
    assert torch.equal(other.outer(0)["theta"], optimizer.outer(0)["theta"])
    units = stage.layout.ids[:2]
    assert {"model", "theta", "outer_momentum", "residual"} <= optimizer.copy(units, newest=-1).keys()


def test_the_memory_plan_counts_twelve_bytes_more_for_each_parameter():
    with_outer, without = stage_memory(island(), 0), stage_memory(PLAIN, 0)
    assert with_outer.state - without.state == pytest.approx(3 * without.gradient)
