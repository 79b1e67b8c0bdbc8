"""The mapping from sample numbers to windows."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle_pp.data.order import PATTERN, Order, interleaved
from recycle_pp.data.permutation import permuted

COUNTS = st.lists(st.integers(1, 300), min_size=1, max_size=5)


@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 5))
@settings(max_examples=30)
def test_a_permutation_hits_every_number_once(n, seed, epoch):
    assert sorted(permuted(i, n, (seed, epoch)) for i in range(n)) == list(range(n))


def test_epochs_and_seeds_are_permuted_differently():
    orders = {tuple(permuted(i, 100, key) for i in range(100)) for key in [(0, 0), (0, 1), (1, 0)]}
    assert len(orders) == 3 and tuple(range(100)) not in orders


@given(COUNTS, st.integers(0, 9))
@settings(max_examples=30)
def test_without_weights_every_window_of_every_source_comes_once_per_epoch(counts, seed):
    order, total = Order(counts, None, seed), sum(counts)
    for epoch in range(2):
        assert sorted(order.window(epoch * total + n) for n in range(total)) == list(range(total))


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(0.05, 1.0)), min_size=2, max_size=4), st.integers(0, 9))
@settings(max_examples=15)
def test_with_weights_each_source_has_its_share_of_any_range_and_its_own_epochs(sources, seed):
    counts, weights = [count for count, _ in sources], [weight for _, weight in sources]
    order = Order(counts, weights, seed)
    starts = [sum(counts[:s]) for s in range(len(counts) + 1)]
    windows = [order.window(n) for n in range(PATTERN)]
    for source, weight in enumerate(weights):
        inside = [starts[source] <= window < starts[source + 1] for window in windows]
        share = weight / sum(weights)
        assert sum(inside) / len(windows) == pytest.approx(share, abs=1 / PATTERN)
        for begin in range(0, PATTERN - 500, 500):
            assert sum(inside[begin : begin + 500]) == pytest.approx(500 * share, abs=2.5)
        own = [window for window, here in zip(windows, inside, strict=True) if here]
        for epoch in range(len(own) // counts[source]):
            part = own[epoch * counts[source] : (epoch + 1) * counts[source]]
            assert sorted(part) == list(range(starts[source], starts[source + 1]))


def test_a_weight_does_not_change_the_order_of_a_single_source():
    assert [Order([50], [3.0], 1).window(n) for n in range(120)] == [Order([50], None, 1).window(n) for n in range(120)]


@given(st.lists(st.tuples(st.integers(0, 300), st.floats(0.05, 1.0)), min_size=1, max_size=4), st.booleans())
@settings(max_examples=30)
def test_held_out_windows_come_once_in_order_and_any_first_ones_contain_the_share_of_each_source(sources, weighted):
    counts = [count for count, _ in sources]
    weights = [weight for _, weight in sources] if weighted else None
    shares, found = weights or counts, interleaved(counts, weights).tolist()
    assert sorted(found) == list(range(sum(counts)))
    lasts = min((c / share for c, share in zip(counts, shares, strict=True) if share), default=0) * sum(shares)
    for source, share in enumerate(shares):
        start = sum(counts[:source])
        mine = [window for window in found if start <= window < start + counts[source]]
        assert mine == sorted(mine)
        for n in range(int(lasts)):
            there = sum(start <= window < start + counts[source] for window in found[:n])
            assert there == pytest.approx(n * share / sum(shares), abs=len(counts))


def test_held_out_windows_of_a_single_source_keep_their_order():
    assert interleaved([50], None).tolist() == interleaved([50], [3.0]).tolist() == list(range(50))


def test_the_billionth_sample_is_found_without_its_predecessors():
    order = Order([10**7, 10**5], [0.9, 0.1], 0)
    windows = [order.window(10**9 + n) for n in range(1000)]
    assert Counter(window < 10**7 for window in windows)[True] == pytest.approx(900, abs=2)


def test_a_weight_too_small_to_be_drawn_is_rejected():
    with pytest.raises(ValueError, match=r"^data\.weights: 0\.0001 is less than 1/4096 of the sum"):
        Order([10, 10], [1.0, 0.0001], 0)


@given(COUNTS, st.booleans(), st.integers(1, 5), st.integers(0, 9))
@settings(max_examples=30)
def test_parts_share_no_window_in_any_epoch_and_cover_all(counts, weighted, parts, seed):
    counts = [count + parts for count in counts]
    weights = [1.0] * len(counts) if weighted and len(counts) > 1 else None
    drawn = 3 * PATTERN if weights else 3 * sum(counts)
    found = []
    for part in range(parts):
        order = Order(counts, weights, seed, (part, parts))
        found.append({order.window(n) for n in range(drawn)})
    assert sum(map(len, found)) == len(set().union(*found)) == sum(counts)


@given(st.integers(10, 100), st.integers(2, 5), st.integers(0, 9))
@settings(max_examples=30)
def test_a_part_has_each_of_its_windows_once_per_epoch_in_different_orders(count, parts, seed):
    order, mine = Order([count], None, seed, (1, parts)), len(range(1, count, parts))
    epochs = [[order.window(epoch * mine + n) for n in range(mine)] for epoch in range(3)]
    assert all(len({*epoch}) == mine and {*epoch} == {*epochs[0]} for epoch in epochs)


def test_more_parts_than_windows_are_refused():
    with pytest.raises(ValueError, match=r"islands\.parts=8, but there are only 7 training samples"):
        Order([7], None, 0, (0, 8))
