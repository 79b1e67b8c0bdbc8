"""The accumulated weight gradient: values, determinism, and its fixed-point form."""

import pytest
import torch
from compare import DEVICE, error, randn
from hypothesis import given, settings
from hypothesis import strategies as st
from recycle_kernels import Tile, dequantise, weight_grad, weight_grad_fixed, weight_grad_reference
from recycle_kernels.weight_grad import tile_of

E = torch.tensor([40], dtype=torch.int32, device=DEVICE)  # one exponent for all rows
LIMIT = 2.0**60  # in fixed-point units; four such addends fit into int64
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # the interpreter's bfloat16 products are wrong
TABLE = {tile_of(size, size, torch.bfloat16, arch) for size in (1024, 1920, 4096) for arch in (80, 90)}


def exact_product(buffer, dy, x):
    result = buffer.double()
    weight_grad_reference(result, dy, x)
    return result


@settings(max_examples=10, deadline=None)
@given(tokens=st.integers(1, 90), out=st.integers(1, 150), inner=st.integers(1, 150), exponent=st.integers(-12, 12))
def test_any_shape_and_magnitude_agrees_with_float64(tokens, out, inner, exponent):
    dy, x = randn(tokens, out, scale=10.0**exponent), randn(tokens, inner)
    buffer = randn(out, inner, scale=10.0**exponent)
    exact = exact_product(buffer, dy, x)
    terms = exact_product(buffer.abs(), dy.abs(), x.abs())  # a sum can cancel, so compare with the size of its terms
    weight_grad(buffer, dy, x)
    assert (buffer - exact).norm() < 1e-6 * terms.norm()


def test_the_first_product_overwrites_the_buffer_without_reading_it(dtype):
    dy, x, bad = randn(40, 130, dtype=dtype), randn(40, 70, dtype=dtype), torch.zeros(2, device=DEVICE)
    poisoned, zeroed = torch.full((130, 70), float("nan"), device=DEVICE), torch.zeros(130, 70, device=DEVICE)
    weight_grad(poisoned, dy, x, first=True)
    weight_grad(zeroed, dy, x)
    assert torch.equal(poisoned, zeroed)
    poisoned, zeroed = torch.full((130, 70), -77, device=DEVICE), torch.zeros_like(zeroed, dtype=torch.int64)
    weight_grad_fixed(poisoned, dy, x, E, LIMIT, bad, first=True)
    weight_grad_fixed(zeroed, dy, x, E, LIMIT, bad)
    assert torch.equal(poisoned, zeroed) and zeroed.any()


def test_operands_of_any_dtype_are_summed_in_float32(dtype):
    dy, x, buffer = randn(256, 130, dtype=dtype), randn(256, 70, dtype=dtype), randn(130, 70)
    exact = exact_product(buffer, dy, x)
    weight_grad(buffer, dy, x)
    assert error(buffer, exact) < 1e-6


def test_slices_and_transposes_are_accepted(dtype):
    packed, flipped = randn(64, 200, dtype=dtype), randn(70, 64, dtype=dtype)
    dy, x = packed[:, 40:170], flipped.T
    strided, dense = torch.zeros(130, 70, device=DEVICE), torch.zeros(130, 70, device=DEVICE)
    weight_grad(strided, dy, x)
    weight_grad(dense, dy.contiguous(), x.contiguous())
    assert torch.equal(strided, dense)


def test_the_same_product_has_the_same_bits_every_time(dtype):
    dy, x = randn(512, 192, dtype=dtype), randn(512, 192, dtype=dtype)
    results = []
    for _ in range(3):
        buffer = torch.zeros(192, 192, device=DEVICE)
        weight_grad(buffer, dy, x)
        results.append(buffer)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_given_tile_is_used():
    dy, x = randn(40, 96), randn(40, 64)
    chosen, default = torch.zeros(96, 64, device=DEVICE), torch.zeros(96, 64, device=DEVICE)
    weight_grad(chosen, dy, x, tile=Tile(32, 16, 16))
    weight_grad(default, dy, x)
    assert error(chosen, default) < 1e-6
    with pytest.raises(Exception, match="power of 2"):
        weight_grad(chosen, dy, x, tile=Tile(24, 16, 16))


@pytest.mark.slow
@pytest.mark.parametrize("tile", sorted(TABLE), ids=str)
def test_every_tile_of_the_table_gives_the_right_product(tile):
    dy, x, buffer = randn(100, 304, dtype=HALF), randn(100, 528, dtype=HALF), randn(304, 528)
    q, total = torch.zeros_like(buffer, dtype=torch.int64), torch.empty_like(buffer)
    bad = torch.zeros(2, device=DEVICE)
    exact, product = exact_product(buffer, dy, x), exact_product(torch.zeros_like(buffer), dy, x)
    weight_grad(buffer, dy, x, tile=tile)
    assert error(buffer, exact) < 1e-6
    weight_grad_fixed(q, dy, x, E, LIMIT, bad, tile=tile)
    dequantise(q, E, total)
    assert error(total, product) < 1e-6 and not bad.any()


@pytest.mark.parametrize("order", [pytest.param((3, 2, 1, 0), marks=pytest.mark.slow), (2, 0, 3, 1)])
def test_micro_batches_add_up_to_the_same_bits_in_any_order(order):
    parts = [(randn(30, 130, scale=10.0**-i), randn(30, 70)) for i in range(4)]
    bad = torch.zeros(2, dtype=torch.float64, device=DEVICE)
    sums = []
    for sequence in (range(4), order):
        q = torch.zeros(130, 70, dtype=torch.int64, device=DEVICE)
        for i in sequence:
            weight_grad_fixed(q, *parts[i], E, LIMIT, bad)
        sums.append(q)
    assert torch.equal(*sums)
    assert not bad.any()
    exact = sum(dy.double().T @ x.double() for dy, x in parts)
    total = torch.empty(130, 70, device=DEVICE)
    dequantise(sums[0], E, total)
    assert error(total, exact) < 1e-6


def test_a_product_that_does_not_fit_raises_the_flag():
    q = torch.zeros(130, 70, dtype=torch.int64, device=DEVICE)
    bad = torch.zeros(2, dtype=torch.float64, device=DEVICE)
    dy, x = randn(30, 130), randn(30, 70)
    dy[3, 5] = float("inf")
    weight_grad_fixed(q, dy, x, E, LIMIT, bad)
    assert bad.tolist() == [1, 1]
    assert not q[5].any()  # an addend that does not fit counts as 0
    assert q[6].all()


def test_rows_have_their_own_exponents_and_the_sum_may_be_int32():
    dy, x = randn(30, 130, scale=1e-3), randn(30, 70)
    dy *= torch.logspace(-3, 2, 130, device=DEVICE)
    exact = exact_product(torch.zeros(130, 70, device=DEVICE), dy, x)
    _, bits = torch.frexp(exact.abs().amax(1).float())
    exponents, bad = (22 - bits).int(), torch.zeros(2, dtype=torch.float64, device=DEVICE)
    q, total = torch.zeros(130, 70, dtype=torch.int32, device=DEVICE), torch.empty(130, 70, device=DEVICE)
    weight_grad_fixed(q, dy, x, exponents, 2.0**26, bad)
    weight_grad_fixed(q, dy, x, exponents, 2.0**26, bad)
    dequantise(q, exponents, total)
    assert not bad.any()
    for row in range(130):
        assert error(total[row], 2 * exact[row]) < 1e-5
