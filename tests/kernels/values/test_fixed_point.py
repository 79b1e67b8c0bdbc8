"""Fixed-point sums: bits, rounding, the flag."""

import torch
from compare import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st
from recycle_kernels import dequantise, dequantise_reference, quantise_add, quantise_add_reference

floats = st.floats(width=32, allow_subnormal=True)  # NaN and infinities too


LIMIT = 2.0**53


def run(add, values, exponent, first=False):
    q, bad = torch.arange(len(values), device=DEVICE), torch.zeros((), dtype=torch.float64, device=DEVICE)
    add(q, values, exponent, LIMIT, bad, first)
    return q, bad


def restored(restore, q, exponent):
    out = torch.empty(q.shape, device=DEVICE)
    restore(q, exponent, out)
    return out


@settings(max_examples=60, deadline=None)
@given(values=st.lists(floats, min_size=1, max_size=40), exponent=st.integers(-20, 60), first=st.booleans())
def test_kernel_and_reference_agree_in_every_bit(values, exponent, first):
    grad = torch.tensor(values, dtype=torch.float32, device=DEVICE)
    q, bad = run(quantise_add, grad, exponent, first)
    exact_q, exact_bad = run(quantise_add_reference, grad, exponent, first)
    assert torch.equal(q, exact_q)
    assert torch.equal(bad, exact_bad)
    assert torch.equal(restored(dequantise, q, exponent), restored(dequantise_reference, q, exponent))


def test_halves_round_to_even():
    grad = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5], device=DEVICE) * 2.0**-40
    q, _ = run(quantise_add, grad, 40)
    assert (q - torch.arange(6, device=DEVICE)).tolist() == [0, 2, 2, 0, -2, -2]


def test_small_gradients_keep_more_bits_than_float32_sums():
    grad = torch.full((3000,), 1e-9, device=DEVICE)
    q, bad = torch.zeros(3000, dtype=torch.int64, device=DEVICE), torch.zeros((), dtype=torch.float64, device=DEVICE)
    one = torch.ones_like(grad)
    quantise_add(q, one, 45, LIMIT, bad)
    for _ in range(8):
        quantise_add(q, grad, 45, LIMIT, bad)
    q -= 1 << 45
    assert torch.allclose(restored(dequantise, q, 45), 8 * grad, rtol=1e-4)
    assert torch.equal(sum([grad] * 8, one) - one, torch.zeros_like(one))  # in float32 they are lost
