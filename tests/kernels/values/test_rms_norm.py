"""RMSNorm: values, gradients, and the split of its backward."""

import pytest
import torch
from compare import close, double, grads, randn
from hypothesis import given, settings
from hypothesis import strategies as st
from recycle_kernels import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_keeping, rms_norm_reference


@settings(max_examples=12, deadline=None)
@given(rows=st.integers(1, 150), width=st.sampled_from([1, 7, 64, 100, 257]), exponent=st.integers(-15, 15))
def test_any_shape_and_magnitude_agrees_with_float64(rows, width, exponent):
    x, weight = randn(rows, width, scale=10.0**exponent, grad=True), randn(width, grad=True)
    y, exact_inputs = rms_norm(x, weight), double(x, weight)
    exact = rms_norm_reference(*exact_inputs)
    dy = randn(rows, width)
    assert close(y, exact)
    (dx, dw), (exact_dx, exact_dw) = grads(y, [x, weight], [dy]), grads(exact, exact_inputs, [dy])
    # Terms of these sums can cancel (those of dx do in a row of one element), so compare the error with their size.
    scale = torch.rsqrt(x.detach().double().square().mean(-1, keepdim=True) + 1e-5)
    assert (dx - exact_dx).norm() < 1e-6 * (dy * weight * scale).norm()
    assert (dw - exact_dw).norm() < 1e-6 * (dy * x * scale).abs().sum(0).norm()


@pytest.mark.parametrize("width", [96, 5000])
def test_the_residual_stream_carries_its_gradient_through(width, dtype):
    x, residual = randn(70, width, dtype=dtype, grad=True), randn(70, width, grad=True)
    weight = randn(width, grad=True)
    outputs, inputs = add_rms_norm(x, residual, weight), double(x, residual, weight)
    exact = add_rms_norm_reference(*inputs)
    upstream = [randn(70, width, dtype=dtype), randn(70, width)]
    assert close(outputs, exact, dtype)
    assert [y.dtype for y in outputs] == [dtype, torch.float32]
    computed = grads(outputs, [x, residual, weight], upstream)
    assert [g.dtype for g in computed] == [dtype, torch.float32, torch.float32]
    assert close(computed, grads(exact, inputs, upstream), dtype)


@pytest.mark.parametrize("width", [96, 5000])
def test_a_missing_residual_branch_has_the_same_bits_as_a_zero_one(width):
    """The first layer of a stage has no residual branch, so a stage boundary changes no bit."""
    x, weight, upstream = randn(70, width, grad=True), randn(width, grad=True), [randn(70, width), randn(70, width)]
    kept = rms_norm_keeping(x, weight)
    added = add_rms_norm(torch.zeros_like(x), x, weight)
    assert all(map(torch.equal, kept, added))
    assert all(map(torch.equal, grads(kept, [x, weight], upstream), grads(added, [x, weight], upstream)))


def test_an_unused_norm_passes_the_residual_gradient_through():
    x, residual, weight = randn(5, 32, grad=True), randn(5, 32, grad=True), randn(32, grad=True)
    _, h = add_rms_norm(x, residual, weight)
    upstream = randn(5, 32)
    dx, dresidual = grads(h, [x, residual], [upstream])
    assert torch.equal(dx, upstream)
    assert torch.equal(dresidual, upstream)


def test_strided_and_broadcast_tensors_give_the_values_of_dense_ones():
    wide, weight = randn(40, 192), randn(96, grad=True)
    x = wide[:, ::2].detach().requires_grad_()
    y, dense = rms_norm(x, weight), rms_norm(x.detach().contiguous(), weight)
    assert torch.equal(y, dense)
    (exact_x,) = double(x)
    ones = torch.ones((), device=x.device).expand(40, 96)  # the gradient of a sum
    assert close(grads(y, [x], [ones]), grads(rms_norm_reference(exact_x, weight.double()), [exact_x], [ones]))


def test_a_row_too_wide_for_one_program_raises_value_error():
    with pytest.raises(ValueError, match="the maximum width is 16384"):
        rms_norm(randn(1, 20000), randn(20000))
