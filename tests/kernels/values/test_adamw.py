"""AdamW in one launch: values, the undo copy, and the norms for clipping."""

import pytest
import torch
from compare import DEVICE, close, error, randn
from recycle_kernels import (
    AdamW,
    adamw,
    adamw_reference,
    make_chunks,
    roll_back,
    squared_norms,
    squared_norms_reference,
)

SIZES = [2111, 9, 2380]  # a matrix of more than one chunk, a norm weight, a matrix
N = sum(SIZES)
HYPER = AdamW(1e-2, weight_decay=0.1)


@pytest.fixture(params=["odd", "aligned"])
def chunks(request):
    sizes = SIZES if request.param == "odd" else [2112, 8, 2380]
    return make_chunks(sizes, [True, False, True], DEVICE)


def problem(scale=1.0, moments=torch.float32):
    """(state, gradient)"""
    mean, square = randn(N, scale=0.1 * scale), randn(N, scale=scale).square()
    return (randn(N), mean.to(moments), square.to(moments)), randn(N, scale=scale)


def empty(moments=torch.float32):
    return tuple(torch.empty(N, device=DEVICE, dtype=dtype) for dtype in (torch.float32, moments, moments))


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("step", [1, 1000])
def test_a_step_agrees_with_float64(scale, step, chunks):
    state, grad = problem(scale)
    exact = tuple(t.double() for t in state)
    adamw(state, grad, chunks, HYPER, step, scale=0.3)
    adamw_reference(exact, grad.double(), chunks, HYPER, step, scale=0.3)
    assert close(state, exact)


@pytest.mark.parametrize("step", [1, 1000])
def test_moments_in_bfloat16_are_rounded_after_a_step_in_float32(step, chunks):
    (param, *moments), grad = problem(moments=torch.bfloat16)
    wide = (param.clone(), *(of.float() for of in moments))
    adamw((param, *moments), grad, chunks, HYPER, step)
    adamw(wide, grad, chunks, HYPER, step)
    assert torch.equal(param, wide[0])
    for mine, of in zip(moments, wide[1:], strict=True):
        if DEVICE == "cuda":
            assert torch.equal(mine, of.bfloat16())
        else:  # Triton's interpreter truncates instead of rounding
            assert torch.equal(mine, (of.view(torch.int32) & -(1 << 16)).view(torch.float32))


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_roll_back_restores_every_bit(moments, chunks):
    state, grad = problem(moments=moments)
    before, undo = [t.clone() for t in state], empty(moments)
    adamw(state, grad, chunks, HYPER, 3, undo=undo)
    assert not torch.equal(state[0], before[0])
    roll_back(state, undo)
    assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))


def test_keeping_an_undo_copy_does_not_change_the_step(chunks):
    plain, grad = problem()
    kept = tuple(t.clone() for t in plain)
    adamw(plain, grad, chunks, HYPER, 3)
    adamw(kept, grad, chunks, HYPER, 3, undo=empty())
    assert all(torch.equal(a, b) for a, b in zip(plain, kept, strict=True))


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])  # 1e-25 and 1e25: the squares underflow or overflow in float32
def test_norms_are_precise_at_any_magnitude(scale, chunks):
    grad = randn(N, scale=scale)
    assert error(squared_norms(grad, chunks), squared_norms_reference(grad, chunks)) < 1e-14


def test_the_norm_of_a_parameter_has_the_same_bits_alone_and_among_others(monkeypatch):
    """On a GPU the order of a sum depends on the alignment of its vector, so each vector is aligned to 32 bytes."""
    sizes, flags, offsets = [2112, 8, 3 * 2048, 2380], [True, False, True, True], set()
    grad, total = randn(sum(sizes)), torch.Tensor.sum
    alone = [squared_norms(of, make_chunks([len(of)], [True], DEVICE)) for of in grad.split(sizes)]
    monkeypatch.setattr(torch.Tensor, "sum", lambda part: offsets.add(part.data_ptr() % 32) or total(part))
    assert torch.equal(squared_norms(grad, make_chunks(sizes, flags, DEVICE)), torch.cat(alone))
    assert offsets == {0}


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_norm_is_non_finite_if_and_only_if_an_element_is(poison, chunks):
    grad = randn(N)
    assert squared_norms(grad, chunks).isfinite().all()
    grad[2115] = poison
    assert squared_norms(grad, chunks).isfinite().tolist() == [True, False, True]
