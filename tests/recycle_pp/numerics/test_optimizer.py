"""AdamW steps at the commit, and speculative steps before it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recycle_pp.config.settings import Optimizer
from recycle_pp.model.stage import Stage
from recycle_pp.numerics.hyperparameters import factors, learning_rate
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.protocol.ballot import clip_scale
from recycle_pp.testing import reference_trainer as plain
from tests.recycle_pp.in_process import CPU, everything, gradient, same, small

SETTINGS = small(parallel__stages=1, numerics__reproducible=True)


def stage_and_optimizer() -> tuple[Stage, StageOptimizer]:
    stage = Stage(SETTINGS, 0, CPU)
    return stage, StageOptimizer(SETTINGS, stage)


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_a_step_has_the_bits_of_torchs_adamw_after_clipping(scale):
    stage, optimizer = stage_and_optimizer()
    model = plain.whole(SETTINGS)
    reference = plain.adamw(SETTINGS, list(model.parameters()))
    for step in range(4):
        reduced = gradient(stage, step)
        for parameter, grad in zip(model.parameters(), stage.layout.views(reduced.flat), strict=True):
            parameter.grad = grad * scale
        for group in reference.param_groups:
            group["lr"] = optimizer.lr(step)
        reference.step()
        optimizer.step(reduced, step, scale)
    for name, parameter in model.named_parameters():
        assert torch.equal(stage.parameters[name], parameter), name


def test_a_step_does_not_change_the_reduced_gradient():
    stage, optimizer = stage_and_optimizer()
    reduced = gradient(stage, 0)
    before = reduced.flat.clone()
    optimizer.step(reduced, 0, 0.5)
    assert torch.equal(reduced.flat, before)


def test_a_confirmed_speculation_equals_a_step_at_the_commit():
    stage, optimizer = stage_and_optimizer()
    other, expected = stage_and_optimizer()
    for step in range(3):
        optimizer.speculate(gradient(stage, step), step)
        optimizer.confirm()
        expected.step(gradient(other, step), step)
    assert same(everything(optimizer), everything(expected))


def test_undo_restores_every_bit_each_time():
    stage, optimizer = stage_and_optimizer()
    optimizer.step(gradient(stage, 0), 0)
    before = everything(optimizer)
    for _ in range(2):
        optimizer.speculate(gradient(stage, 1), 1)
        assert not same(everything(optimizer), before)
        optimizer.undo()
        assert same(everything(optimizer), before)
    optimizer.speculate(gradient(stage, 1), 1)
    optimizer.confirm()
    other, expected = stage_and_optimizer()
    for step in range(2):
        expected.step(gradient(other, step), step)
    assert same(everything(optimizer), everything(expected))


def test_the_undo_copy_is_allocated_once_and_only_for_speculation():
    stage, optimizer = stage_and_optimizer()
    optimizer.step(gradient(stage, 0), 0)
    held = optimizer.held[0]
    assert held.before is None
    addresses = set()
    for step in range(1, 4):
        optimizer.speculate(gradient(stage, step), step)
        addresses.add(tuple(tensor.data_ptr() for tensor in held.before))
        optimizer.confirm()
    assert len(addresses) == 1


def test_state_moves_between_splits_by_full_model_names():
    stage, optimizer = stage_and_optimizer()
    for step in range(2):
        optimizer.step(gradient(stage, step), step)
    state = everything(optimizer)
    halves = small(parallel__stages=2, numerics__reproducible=True)
    merged: dict[str, torch.Tensor] = {}
    for number in range(2):
        part = Stage(halves, number, CPU)
        loaded = StageOptimizer(halves, part)
        loaded.load(state)
        merged |= everything(loaded)
    assert same(merged, state)
    assert {name.partition(".")[0] for name in state} == {"model", "exp_avg", "exp_avg_sq", "exponent"}


def test_a_state_with_one_exponent_per_tensor_can_be_loaded():
    """Old checkpoints have such states. All rows of the tensor get its exponent."""
    stage, optimizer = stage_and_optimizer()
    state = everything(optimizer)
    for number, name in enumerate(stage.names):
        state[f"exponent.{name}"] = torch.tensor(number)
    optimizer.load(state)
    gradients = stage.gradients
    assert [gradients.exponents_of(k).unique().tolist() for k in range(len(stage.names))] == [
        [k] for k in range(len(stage.names))
    ]
    assert gradients.exponents.dtype == torch.int32


@given(st.integers(0, 20), st.integers(1, 100))
def test_the_learning_rate_rises_linearly_and_falls_as_a_cosine(warmup, more):
    optimizer, steps = Optimizer(lr=1.0, min_lr=0.1, warmup=warmup), warmup + more
    rates = [learning_rate(optimizer, step, steps) for step in range(steps + 1)]
    assert rates[:warmup] == pytest.approx([(step + 1) / warmup for step in range(warmup)])
    assert rates[warmup] == pytest.approx(1.0) and rates[-1] == pytest.approx(0.1)
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)


@given(st.integers(0, 20), st.integers(1, 100), st.floats(0.01, 1.0))
def test_wsd_stays_at_lr_and_falls_linearly_in_its_last_share(warmup, more, decay):
    steps = warmup + more
    optimizer = Optimizer(lr=1.0, min_lr=0.1, warmup=warmup, schedule="wsd", decay=decay)
    rates = [learning_rate(optimizer, step, steps) for step in range(steps + 1)]
    begin = max(warmup, steps - max(1, round(decay * steps)))
    assert rates[warmup:begin] == [1.0] * (begin - warmup)
    falls = [earlier - later for earlier, later in zip(rates[begin:], rates[begin + 1 :], strict=False)]
    assert falls == pytest.approx([0.9 / (steps - begin)] * (steps - begin))


@given(st.integers(0, 20), st.integers(2, 100))
def test_linear_falls_evenly_to_min_lr_and_constant_does_not_fall(warmup, more):
    steps = warmup + more
    linear = [
        learning_rate(Optimizer(lr=1.0, min_lr=0.1, warmup=warmup, schedule="linear"), k, steps) for k in range(steps)
    ]
    assert linear[warmup:] == pytest.approx([1.0 - 0.9 * k / more for k in range(more)])
    constant = [learning_rate(Optimizer(lr=1.0, warmup=warmup, schedule="constant"), k, steps) for k in range(steps)]
    assert constant[warmup:] == [1.0] * more and constant[:warmup] == linear[:warmup]


def test_the_first_pattern_that_matches_a_name_gives_its_factors():
    optimizer = Optimizer(groups=["embedding.*:0.1", "*norm*:1:0", "layers.?.*:2:0.5"])
    names = {"embedding.weight": (0.1, 1), "layers.3.ffn_norm.weight": (1, 0), "layers.3.ffn.w_down.weight": (2, 0.5)}
    assert {name: factors(optimizer, name) for name in names} == names
    assert factors(optimizer, "head.weight") == factors(Optimizer(), "embedding.weight") == (1.0, 1.0)


def test_groups_have_the_bits_of_torchs_adamw_with_param_groups():
    settings = small(
        parallel__stages=1,
        optimizer__groups=["embedding.*:0.1", "*.w_down.*:3:0.5", "head.*:1:0"],
        optimizer__clip=None,
    )
    stage = Stage(settings, 0, CPU)
    optimizer, model = StageOptimizer(settings, stage), plain.whole(settings)
    o = settings.optimizer
    reference = torch.optim.AdamW(
        [
            {"params": [parameter], "weight_decay": o.weight_decay * decay * (parameter.dim() >= 2), "factor": lr}
            for name, parameter in model.named_parameters()
            for lr, decay in [factors(o, name)]
        ],
        betas=(o.beta1, o.beta2), eps=o.eps, fused=True,
    )  # fmt: skip
    for step in range(4):
        reduced = gradient(stage, step)
        for parameter, grad in zip(model.parameters(), stage.layout.views(reduced.flat), strict=True):
            parameter.grad = grad
        for group in reference.param_groups:
            group["lr"] = optimizer.lr(step) * group["factor"]
        reference.step()
        optimizer.speculate(reduced, step)
        optimizer.undo()
        optimizer.speculate(reduced, step)
        optimizer.confirm()
    for name, parameter in model.named_parameters():
        assert torch.equal(stage.parameters[name], parameter), name


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.floats(1e-3, 1e3), st.randoms())
def test_clipping_uses_torchs_formula_and_does_not_depend_on_the_order_of_stages(squares, clip, random):
    norm, scale = clip_scale(squares, clip)
    grads = [torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in squares]
    for parameter, square in zip(grads, squares, strict=True):
        parameter.grad = torch.tensor([math.sqrt(square)], dtype=torch.float64)
    assert norm == pytest.approx(torch.nn.utils.clip_grad_norm_(grads, clip).item())
    assert [p.grad.item() for p in grads] == pytest.approx([math.sqrt(square) * scale for square in squares])
    random.shuffle(squares)
    assert clip_scale(squares, clip) == (norm, scale)
    assert clip_scale(squares, None) == (norm, 1.0)
