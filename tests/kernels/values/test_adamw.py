"""AdamW in one launch: values, clipping, undo; the norm it is clipped by."""

import pytest
import torch
from compare import DEVICE, close, error, randn
from recycle_kernels import (
    adamw,
    adamw_reference,
    clip_factor,
    make_chunks,
    roll_back,
    squared_norm,
    squared_norm_reference,
)

SIZES = [1111, 9, 1380]  # a matrix of more than one chunk, a norm weight, a matrix
N = sum(SIZES)
HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture(params=["odd", "aligned"])
def chunks(request):
    sizes = SIZES if request.param == "odd" else [1112, 8, 1380]
    return make_chunks(sizes, [True, False, True], DEVICE)


def state(scale=1.0):
    return [randn(N), randn(N, scale=scale), randn(N, scale=0.1 * scale), randn(N, scale=scale).square()]


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("step", [1, 1000])
def test_a_step_agrees_with_float64(scale, step, chunks):
    tensors = state(scale)
    exact = [t.double() for t in tensors]
    clip = torch.tensor(0.37, device=DEVICE)
    adamw(*tensors, chunks, step=step, scale=0.125, clip=clip, **HYPER)
    adamw_reference(*exact, chunks, step=step, scale=0.125, clip=clip, **HYPER)
    assert close(tensors, exact)


def test_roll_back_restores_every_bit(chunks):
    tensors = state()
    before = [t.clone() for t in tensors]
    undo = tuple(torch.empty_like(tensors[0]) for _ in range(3))
    adamw(*tensors, chunks, step=3, undo=undo, **HYPER)
    assert not torch.equal(tensors[0], before[0])
    roll_back(tensors[0], tensors[2], tensors[3], undo)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_keeping_an_undo_copy_does_not_change_the_step(chunks):
    plain = state()
    kept = [t.clone() for t in plain]
    adamw(*plain, chunks, step=3, **HYPER)
    adamw(*kept, chunks, step=3, undo=tuple(torch.empty_like(kept[0]) for _ in range(3)), **HYPER)
    assert all(torch.equal(a, b) for a, b in zip(plain, kept, strict=True))


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])  # squares that float32 cannot hold
def test_the_norm_holds_its_precision_at_any_magnitude(scale):
    grad = randn(20_000, scale=scale)
    assert error(squared_norm(grad), squared_norm_reference(grad)) < 1e-14


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_the_norm_is_not_finite_exactly_when_an_element_is_not(poison):
    grad = randn(20_000)
    assert squared_norm(grad).isfinite()
    grad[12_345] = poison
    assert not squared_norm(grad).isfinite()


def test_clipping_is_that_of_torch():
    grad = randn(N, scale=3.0)
    parameter = torch.nn.Parameter(torch.zeros(N, device=DEVICE))
    parameter.grad = grad.clone()
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    assert close(grad * clip_factor(squared_norm(grad), 1.0), parameter.grad)
    assert clip_factor(squared_norm(grad * 1e-6), 1.0).item() == 1.0
