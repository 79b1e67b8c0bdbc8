"""Fixed-point sums have the same bits in any order and on any worker, and the precision of float32."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle_pp.numerics import fixed_point as fixed
from recycle_pp.numerics import torch_operations as reference

ELEMENTS = 300


def terms_of(seed: int, count: int, spread: float) -> torch.Tensor:
    """(count, ELEMENTS) with magnitudes from 2^-spread to 1, both signs."""
    random = torch.Generator().manual_seed(seed)
    sizes = torch.rand(ELEMENTS, generator=random).mul(-spread).exp2()
    return torch.randn(count, ELEMENTS, generator=random).clamp(-1, 1) * sizes


def exponent(largest, terms, form=fixed.INT64):
    return fixed.exponents(torch.tensor([largest], dtype=torch.float64).float(), terms, form)


def summed(terms, e, count, form=fixed.INT64):
    total, bad = torch.zeros(ELEMENTS, dtype=form.dtype), torch.zeros(2, dtype=torch.float64)
    for number, term in enumerate(terms):
        reference.accumulate(total, term, e, fixed.limit(count, form), bad, first=number == 0)
    return total, bad.any().item()


def restored(total, e):
    out = torch.empty(ELEMENTS)
    reference.restore(total, e, out)
    return out


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40), st.floats(0, 60), st.data())
def test_any_split_of_the_terms_in_any_order_has_the_same_bits(seed, count, spread, data):
    terms = terms_of(seed, count, spread)
    e = exponent(terms.abs().max().item(), count)
    expected, bad = summed(terms, e, count)
    assert not bad
    order = data.draw(st.permutations(range(count)))
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=3)))
    workers = [order[a:b] for a, b in zip([0, *cuts], [*cuts, count], strict=True)]
    assert torch.equal(sum(summed(terms[w], e, count)[0] for w in workers), expected)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 40))
def test_small_elements_are_as_precise_as_in_a_float32_sum(seed, count):
    """Elements range down to 2^-22 of the largest. The error of each is at most one float32 rounding of the exact sum
    plus 2^-46 of the largest per term, and at most an ulp of the element's largest term per term."""
    terms = terms_of(seed, count, 22)
    largest = terms.abs().max().item()
    e = exponent(largest, count)
    ours = restored(summed(terms, e, count)[0], e).double()
    exact = terms.double().sum(0)
    ulp = terms.abs().amax(0).double() * 2.0**-23
    assert bool(((ours - exact).abs() <= exact.abs() * 2.0**-24 + count * largest * 2.0**-46).all())
    assert bool(((ours - exact).abs() <= count * ulp).all())


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 3e38, -3e38])
def test_an_addend_that_does_not_fit_is_detected(poison):
    term = torch.ones(ELEMENTS)
    term[123] = poison
    e = exponent(1.0, 8)
    assert summed([torch.ones(ELEMENTS), term], e, 8)[1] > 0
    assert summed([torch.ones(ELEMENTS)] * 2, e, 8)[1] == 0


@given(st.floats(2.0**-60, 2.0**60), st.integers(3, 1000))
def test_a_sum_4096_times_the_previous_one_still_fits(largest, count):
    e = exponent(largest, count)
    grown = torch.full((ELEMENTS,), largest * 4095 / count)
    total, bad = summed([grown] * 3, e, count)
    assert not bad
    torch.testing.assert_close(restored(total, e), grown * 3)


def test_blocks_cover_every_element():
    count = 2 * reference.BLOCK + 17
    total, bad = torch.zeros(count, dtype=torch.int64), torch.zeros(2, dtype=torch.float64)
    reference.accumulate(
        total, torch.full((count,), 0.5), torch.tensor([10], dtype=torch.int32), fixed.limit(1), bad, first=False
    )
    assert bool((total == 512).all())


def test_models_train_under_deterministic_algorithms(monkeypatch):
    """Every operation of a stage has a deterministic implementation, at least on a CPU."""
    from tests.recycle_pp.in_process import small, train

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    settings = small(numerics__reproducible=True, model__dropout=0.1)
    expected = train(settings, 2)[0]
    try:
        fixed.prepare()
        assert train(settings, 2)[0] == expected
    finally:
        torch.set_deterministic_debug_mode("default")


@given(st.integers(-126, 126))
def test_powers_of_two_are_exact(e):
    assert fixed.powers(torch.tensor([e], dtype=torch.int32)).item() == 2.0**e


FORMS = [fixed.INT64, fixed.INT32]


@pytest.mark.parametrize("form", FORMS, ids=["int64", "int32"])
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 64), scale=st.integers(-60, 60))
def test_both_formats_keep_the_promised_bits(form, seed, count, scale):
    terms = terms_of(seed, count, 8) * 2.0**scale
    largest = terms.abs().max().item()
    e = exponent(largest, count, form)
    total, bad = summed(terms, e, count, form)
    error = (restored(total, e).double() - terms.double().sum(0)).abs().max().item()
    assert not bad
    assert error <= count * largest * 2.0 ** -(form.kept(count)) + terms.double().sum(0).abs().max().item() * 2.0**-24
    assert form.kept(count) >= fixed.LEAST_BITS


@pytest.mark.parametrize("form", FORMS, ids=["int64", "int32"])
@given(count=st.integers(1, 64), sign=st.sampled_from([-1, 1]))
def test_the_promised_number_of_largest_addends_does_not_overflow(form, count, sign):
    e, most = torch.zeros(1, dtype=torch.int32), torch.tensor(fixed.limit(count, form))
    below = torch.nextafter(most, torch.tensor(0.0))
    total, bad = summed([torch.full((ELEMENTS,), sign * below.item())] * count, e, count, form)
    assert not bad and (total.double() == sign * below.double().round() * count).all()
    assert summed([torch.full((ELEMENTS,), sign * most.item())], e, count, form)[1]


def test_the_configuration_rejects_more_micro_batches_than_int32_allows():
    from recycle_pp.config.checks import MOST_INT32_TERMS, int32_bits

    assert all(fixed.INT32.kept(terms) == int32_bits(terms) for terms in range(1, 2 * MOST_INT32_TERMS))
    assert fixed.INT32.kept(MOST_INT32_TERMS) == fixed.LEAST_BITS > fixed.INT32.kept(MOST_INT32_TERMS + 1)
