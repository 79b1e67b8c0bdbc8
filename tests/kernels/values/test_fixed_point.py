"""Fixed-point sums: bits, rounding, flags."""

import torch
from compare import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st
from recycle_kernels import dequantise, dequantise_reference, quantise_add, quantise_add_reference

floats = st.floats(width=32, allow_subnormal=True)  # including NaN and infinities


LIMIT = 2.0**53


def run(add, values, exponents, first=False, dtype=torch.int64, limit=LIMIT):
    q, bad = torch.arange(len(values), device=DEVICE, dtype=dtype), torch.zeros(2, dtype=torch.float64, device=DEVICE)
    add(q, values, exponents, limit, bad, first)
    return q, bad


def restored(restore, q, exponents):
    out = torch.empty(q.shape, device=DEVICE)
    restore(q, exponents, out)
    return out


def of_all_rows(exponent):
    return torch.tensor([exponent], dtype=torch.int32, device=DEVICE)


@settings(max_examples=60, deadline=None)
@given(values=st.lists(floats, min_size=1, max_size=40), exponent=st.integers(-20, 60), first=st.booleans())
def test_kernel_and_reference_agree_in_every_bit(values, exponent, first):
    grad, exponents = torch.tensor(values, dtype=torch.float32, device=DEVICE), of_all_rows(exponent)
    q, bad = run(quantise_add, grad, exponents, first)
    exact_q, exact_bad = run(quantise_add_reference, grad, exponents, first)
    assert torch.equal(q, exact_q)
    assert torch.equal(bad, exact_bad)
    assert torch.equal(restored(dequantise, q, exponents), restored(dequantise_reference, q, exponents))


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.tuples(st.lists(floats, min_size=3, max_size=3), st.integers(-126, 126)), min_size=1, max_size=9),
    dtype=st.sampled_from([torch.int64, torch.int32]),
)
def test_every_row_has_its_own_exponent(rows, dtype):
    grad = torch.tensor([row for row, _ in rows], dtype=torch.float32, device=DEVICE).flatten()
    exponents = torch.tensor([e for _, e in rows], dtype=torch.int32, device=DEVICE)
    results = [run(add, grad, exponents, dtype=dtype, limit=2.0**26) for add in (quantise_add, quantise_add_reference)]
    assert all(map(torch.equal, *results))
    q = results[0][0]
    assert torch.equal(restored(dequantise, q, exponents), restored(dequantise_reference, q, exponents))


def test_halves_round_to_even():
    grad = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5], device=DEVICE) * 2.0**-40
    q, _ = run(quantise_add, grad, of_all_rows(40))
    assert (q - torch.arange(6, device=DEVICE)).tolist() == [0, 2, 2, 0, -2, -2]


def test_small_gradients_keep_more_bits_than_float32_sums():
    grad = torch.full((3000,), 1e-9, device=DEVICE)
    q, bad = torch.zeros(3000, dtype=torch.int64, device=DEVICE), torch.zeros(2, dtype=torch.float64, device=DEVICE)
    one, e = torch.ones_like(grad), of_all_rows(45)
    quantise_add(q, one, e, LIMIT, bad)
    for _ in range(8):
        quantise_add(q, grad, e, LIMIT, bad)
    q -= 1 << 45
    assert torch.allclose(restored(dequantise, q, e), 8 * grad, rtol=1e-4)
    assert torch.equal(sum([grad] * 8, one) - one, torch.zeros_like(one))  # float32 sums lose the small gradients
