"""Distributing layers over stages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle_pp.model.split import layers_of


@given(st.integers(1, 12), st.integers(0, 40))
def test_every_layer_is_in_one_stage_and_sizes_differ_by_at_most_one(stages, more):
    ranges = layers_of(stages + more, stages)
    assert [layer for part in ranges for layer in part] == list(range(stages + more))
    sizes = [len(part) for part in ranges]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_a_given_split_is_used_unchanged():
    assert layers_of(8, 3, [1, 5, 2]) == [range(0, 1), range(1, 6), range(6, 8)]


@pytest.mark.parametrize("split", [[4, 4], [8, 0, 0], [2, 2, 2], [3, 3, 3]])
def test_an_invalid_split_is_rejected_by_name(split):
    with pytest.raises(ValueError, match=r"model\.split .* each of the 3 stages .* 8 in total"):
        layers_of(8, 3, split)


def test_fewer_layers_than_stages_are_rejected():
    with pytest.raises(ValueError, match=r"2 layers, too few for parallel\.stages = 3"):
        layers_of(2, 3)
