"""Rotary position embedding: values, gradients, strides."""

import pytest
import torch
from compare import DEVICE, close, double, grads, randn
from recycle_kernels import rope, rope_qkv, rope_qkv_reference, rope_reference, rope_table


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 24), (3, 1, 64), (1, 1, 2)])
def test_a_packed_projection_is_split_and_rotated_and_its_gradient_is_packed(heads, kv_heads, dim, dtype):
    qkv = randn(2, 5, heads + 2 * kv_heads, dim, dtype=dtype, grad=True)
    table = rope_table(7, dim, device=DEVICE)  # longer than the sequence
    parts, (exact_qkv,) = rope_qkv(qkv, heads, kv_heads, *table), double(qkv)
    exact = rope_qkv_reference(exact_qkv, heads, kv_heads, *(t.double() for t in table))
    assert close(parts, exact, dtype)
    assert torch.equal(parts[2], qkv[:, :, heads + kv_heads :])
    # gradients in attention's layout: heads before positions
    upstream = [randn(2, y.shape[2], 5, dim, dtype=dtype).transpose(1, 2) for y in parts]
    assert close(grads(parts, [qkv], upstream), grads(exact, [exact_qkv], upstream), dtype)


def test_a_slice_of_a_projection_needs_no_copy(dtype):
    packed = randn(2, 6, 7, 16, dtype=dtype)
    cos, sin = rope_table(6, 16, device=DEVICE)
    x = packed[:, :, :5]
    assert torch.equal(rope(x, cos, sin), rope(x.contiguous(), cos, sin))
    assert close(rope(x, cos[:, None], sin[:, None]), rope_reference(x.double(), cos.double(), sin.double()), dtype)


def test_backward_rotates_the_gradient_back():
    x = randn(1, 8, 3, 32, grad=True)
    table = rope_table(8, 32, device=DEVICE)
    y = rope(x, *table)
    assert close(grads(y, [x], [y.detach()])[0], x)


def test_angles_of_far_positions_are_precise():
    cos, _ = rope_table(100_000, 128, theta=10000.0)
    assert cos[99_999, 0].item() == pytest.approx(torch.tensor(99_999.0, dtype=torch.float64).cos().item(), abs=1e-7)
