"""The sums of one worker, and their reduction over its peers."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle_pp.numerics import fixed_point as fixed
from recycle_pp.numerics import torch_operations as reference
from recycle_pp.numerics.gradients import Gradients, Reduced
from recycle_pp.numerics.layout import Layout
from tests.recycle_pp.in_process import CPU

LAYOUT = Layout({"embedding.weight": (9, 5), "norm.weight": (5,), "head.weight": (9, 5)}, lambda *_: None)
G = 6
both = pytest.mark.parametrize("reproducible", [False, True])


def gradients(reproducible: bool) -> Gradients:
    return Gradients(LAYOUT, G, CPU, reproducible=reproducible, ops=reference)


def micro_batch(worker: Gradients, g: int, *, poison: float | None = None) -> None:
    """Adds the gradient of micro-batch g, which is the same on every worker."""
    random = torch.Generator().manual_seed(g)

    def draw(*shape):
        return torch.randn(*shape, generator=random) / G

    worker.add_rows(0, torch.randint(0, 9, (7,), generator=random), draw(7, 5))
    vector = draw(5)
    if poison is not None:
        vector[2] = poison
    worker.add("norm.weight", vector)
    worker.add_product(2, draw(7, 9), draw(7, 5))
    worker.close(g, g + 0.5)


def reduced(workers: list[Gradients]) -> Reduced:
    """The reduction of the workers' sums, all-reduced by hand."""
    payloads = [worker.payload() for worker in workers]
    return workers[0].reduced([sum(tensors[1:], tensors[0]) for tensors in zip(*payloads, strict=True)])


@both
def test_a_worker_adds_the_gradients_of_autograd(reproducible):
    worker = gradients(reproducible)
    tokens, dy, x = torch.tensor([3, 3, 8]), torch.randn(3, 9), torch.randn(3, 5)
    table = torch.zeros(9, 5, requires_grad=True)
    torch.nn.functional.embedding(tokens, table).backward(x)
    for _ in range(2):
        worker.add_rows(0, tokens, x)
        worker.add_product(2, dy, x)
        worker.add_product(2, dy.bfloat16(), x.bfloat16())
    embedding, norm, head = LAYOUT.views(worker.reduced(worker.payload()).flat)
    torch.testing.assert_close(embedding, 2 * table.grad)
    torch.testing.assert_close(head, 2 * (dy.T @ x + (dy.bfloat16().T @ x.bfloat16()).float()))
    assert not norm.any()


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(G)), st.integers(0, G), st.integers(0, G))
def test_reproducible_sums_do_not_depend_on_the_split_or_order_of_micro_batches(order, first, second):
    alone = gradients(True)
    for g in range(G):
        micro_batch(alone, g)
    peers = [gradients(True) for _ in range(3)]
    cuts = sorted([first, second])
    for peer, part in zip(peers, [order[: cuts[0]], order[cuts[0] : cuts[1]], order[cuts[1] :]], strict=True):
        for g in part:
            micro_batch(peer, g)
    expected, ours = reduced([alone]), reduced(peers)
    assert torch.equal(ours.flat, expected.flat) and ours.squares == expected.squares
    assert ours.losses.tolist() == [g + 0.5 for g in range(G)]
    assert ours.counts.tolist() == [1] * G


@both
def test_the_counts_show_a_micro_batch_that_ran_twice_or_never(reproducible):
    here, there = gradients(reproducible), gradients(reproducible)
    for worker, part in ((here, [0, 1, 2]), (there, [2, 4, 5])):
        for g in part:
            micro_batch(worker, g)
    assert reduced([here, there]).counts.tolist() == [1, 1, 2, 0, 1, 1]


@both
def test_a_worker_without_micro_batches_adds_nothing(reproducible):
    here = gradients(reproducible)
    for g in range(G):
        micro_batch(here, g)
    expected = reduced([here])
    idle = gradients(reproducible)
    micro_batch(idle, 0)
    idle.clear()
    assert torch.equal(reduced([here, idle]).flat, expected.flat)
    assert reduced([here, idle]).counts.tolist() == [1] * G


def test_parts_of_a_product_do_not_overflow_together():
    """Two micro-batches of four parts each, all just below a part's limit, do not overflow the int64 sum."""
    worker, most = Gradients(LAYOUT, 2, CPU, reproducible=True, ops=reference), 2.0 ** (62 - 3 - 20)
    worker.exponents = torch.full_like(worker.exponents, 20)
    for g in range(2):
        for _ in range(4):
            worker.add_product(2, torch.full((1, 9), most / 2), torch.full((1, 5), 1.999), parts=4)
        worker.close(g, None)
    result = worker.reduced(worker.payload())
    assert result.finite and result.flat.max() == pytest.approx(8 * most / 2 * 1.999)
    worker.clear()
    worker.add_product(2, torch.full((1, 9), most), torch.ones(1, 5), parts=4)
    worker.close(0, None)
    assert not worker.reduced(worker.payload()).fits


@both
def test_an_aborted_all_reduce_does_not_change_the_accumulators(reproducible):
    worker = gradients(reproducible)
    micro_batch(worker, 0)
    expected = worker.payload()
    for tensor in worker.payload():
        tensor.fill_(77)  # as an all-reduce may leave the payload when it is aborted
    assert all(map(torch.equal, worker.payload(), expected))


@both
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_all_peers_detect_a_gradient_that_is_not_finite(reproducible, poison):
    here, there = gradients(reproducible), gradients(reproducible)
    micro_batch(here, 0)
    micro_batch(there, 1, poison=poison)
    assert not reduced([here, there]).finite
    here.clear(), there.clear()
    micro_batch(here, 0)
    micro_batch(there, 1)
    assert reduced([here, there]).finite


@both
@pytest.mark.parametrize("large", [1e30, -3e38])
def test_a_finite_gradient_that_does_not_fit_counts_as_finite(reproducible, large):
    here, there = gradients(reproducible), gradients(reproducible)
    micro_batch(here, 0)
    micro_batch(there, 1, poison=large)
    result = reduced([here, there])
    assert result.fits is not reproducible
    assert result.finite is reproducible, "its square is infinite in float32"


def test_a_loss_that_is_not_finite_is_detected():
    worker = gradients(False)
    worker.close(0, float("inf"))
    assert not reduced([worker]).finite


@both
def test_a_peer_can_receive_the_reduced_gradient_as_tensors(reproducible):
    worker = gradients(reproducible)
    for g in range(G):
        micro_batch(worker, g)
    sent = reduced([worker])
    got = Reduced.from_tensors([tensor.clone() for tensor in sent.to_tensors()])
    assert torch.equal(got.flat, sent.flat) and got.squares == sent.squares and got.finite is sent.finite
    assert torch.equal(got.counts, sent.counts) and torch.equal(got.losses, sent.losses)


def test_exponents_follow_the_gradient():
    worker = gradients(True)
    micro_batch(worker, 0)
    small = reduced([worker])
    worker.follow(small)
    before = worker.exponents
    tiny = replace(small, flat=small.flat * 2.0**-20)
    worker.follow(tiny)
    assert torch.equal(worker.exponents, before + 20)
    worker.follow(replace(small, flat=torch.zeros_like(small.flat)))
    assert torch.equal(worker.exponents, before + 20), "a gradient of zeros changes no exponent"
    worker.follow(replace(small, finite=False))
    assert torch.equal(worker.exponents, before + 20), "nor does a gradient that is not finite"


@pytest.mark.parametrize("form", [fixed.INT64, fixed.INT32], ids=["int64", "int32"])
@pytest.mark.parametrize("growth", [2.0**k for k in (13, 30, 60, 100)])
def test_a_step_fits_after_a_few_attempts_with_the_same_bits_on_all_peers(form, growth):
    def attempts(*peers):
        for attempt in range(30):
            for peer in peers:
                peer.begin_again(attempt, None) if attempt else peer.clear()
            for k, peer in enumerate(peers):
                for g in range(k, G, len(peers)):
                    peer.add("norm.weight", torch.full((5,), growth / 2.0**10))
                    peer.close(g, None)
            if (result := reduced(list(peers))).fits:
                return attempt, result

    def fresh():
        worker = Gradients(LAYOUT, G, CPU, reproducible=True, ops=reference, form=form)
        worker.take_exponents(fixed.exponents(torch.full((sum(LAYOUT.rows),), 2.0**-10), G, form))
        return worker

    attempt, alone = attempts(fresh())
    again, together = attempts(fresh(), fresh(), fresh())
    assert (attempt, alone.flat.tolist()) == (again, together.flat.tolist()) and 1 <= attempt <= 20
    assert alone.finite == (growth < 2.0**70), "its square is infinite in float32"
    torch.testing.assert_close(
        LAYOUT.views(alone.flat)[1], torch.full((5,), G * growth / 2.0**10), rtol=2.0**-9, atol=0
    )


def test_attempts_start_again_in_the_next_step():
    worker = gradients(True)
    worker.begin_again(1, None)
    assert bool((worker._exponents_now(0) == worker.exponents_of(0) - fixed.INT64.step).all())
    worker.clear()
    assert torch.equal(worker._exponents_now(0), worker.exponents_of(0))


WIDE = Layout({"embedding.weight": (6, 32), "norm.weight": (32,)}, lambda *_: None)


def test_int32_sums_learn_an_exponent_for_every_row_in_the_first_attempt():
    worker = Gradients(WIDE, G, CPU, reproducible=True, ops=reference, form=fixed.INT32)
    grad = torch.randn(6, 32) * torch.tensor([1e-1, 1e-2, 1e-3, 1e-9, 0.0, 1e-1]).unsqueeze(1)

    def attempt():
        worker.add("embedding.weight", grad)
        worker.add("norm.weight", torch.full((32,), 1e-12))
        worker.close(0, None)
        return worker.reduced(worker.payload())

    first = attempt()
    assert not first.fits and first.finite, "the exponents are unknown before the first attempt"
    worker.begin_again(1, first)
    second = attempt()
    assert second.fits
    found, norm = WIDE.views(second.flat)
    for row in (0, 1, 2, 5):
        assert (found[row] - grad[row]).norm() <= grad[row].norm() * 2.0**-12
    assert (found - grad).norm() <= grad.norm() * 2.0**-17
    assert not norm.any() and not found[4].any()
    worker.follow(second)
    worker.clear()
    exponents = worker.exponents_of(0)
    assert len(exponents) == 6 and exponents[0] < exponents[1]
    assert exponents[3] == exponents[4] <= fixed.exponents(grad.abs().max()[None], G, fixed.INT32).item() + 7
    grad[4] = grad[0]
    assert attempt().fits, "a row that becomes nonzero fits"


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(G)), st.integers(0, G))
def test_int32_sums_do_not_depend_on_the_split_of_micro_batches(order, cut):
    def of(*parts):
        before = None
        workers = [Gradients(LAYOUT, G, CPU, reproducible=True, ops=reference, form=fixed.INT32) for _ in parts]
        for attempt in range(2):
            for worker, part in zip(workers, parts, strict=True):
                if attempt:
                    worker.begin_again(attempt, before)
                for g in part:
                    micro_batch(worker, g)
            before = reduced(workers)
        return before

    expected, ours = of(range(G)), of(order[:cut], order[cut:])
    assert ours.fits and torch.equal(ours.flat, expected.flat) and ours.squares == expected.squares


def test_the_squared_norm_is_that_of_float64():
    grad = torch.randn(300, 500) * torch.logspace(-6, 3, 300).unsqueeze(1)
    assert reference.squared_norm(grad).item() == pytest.approx(grad.double().square().sum().item(), rel=1e-6)


def test_a_returned_peer_agrees_on_unknown_exponents_after_a_skipped_first_step():
    def fresh():
        return Gradients(WIDE, G, CPU, reproducible=True, ops=reference, form=fixed.INT32)

    here, back = fresh(), fresh()
    here.add("norm.weight", torch.full((32,), float("nan")))
    here.close(0, None)
    skipped = here.reduced(here.payload())
    assert not skipped.finite
    here.follow(skipped)
    here.clear()
    back.take_exponents(here.exponents)
    assert not here.known and not back.known


def test_gradients_as_large_as_the_first_guess_need_one_attempt():
    worker = Gradients(WIDE, G, CPU, reproducible=True, ops=reference, form=fixed.INT32)

    def attempt():
        worker.add("embedding.weight", torch.full((6, 32), 1.5))
        worker.add("norm.weight", torch.full((32,), 1.5))
        worker.close(0, None)
        return worker.reduced(worker.payload())

    first = attempt()
    worker.begin_again(1, first)
    assert not first.fits and attempt().fits
