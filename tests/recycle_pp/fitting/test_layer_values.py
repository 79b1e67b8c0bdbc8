"""Values per stage, such as times, in another layout, predicted from those in the present layout."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle_pp.fitting.layer_values import by_layer, by_stage, relaid

TIMES = st.floats(1e-4, 1e3)


@st.composite
def layouts(draw, stages, layers):
    """The numbers of layers in each stage, at least one, which add up to `layers`."""
    inner = st.sampled_from(range(1, layers)) if stages > 1 else st.nothing()
    cuts = sorted(draw(st.sets(inner, min_size=stages - 1, max_size=stages - 1)))
    return tuple(b - a for a, b in zip((0, *cuts), (*cuts, layers), strict=True))


@st.composite
def models(draw):
    """(seconds of a layer, of the embedding, of the head, two layouts)"""
    stages = draw(st.integers(3, 6))
    layers = draw(st.integers(stages, 40))
    ends = st.just(0.0) | TIMES
    return draw(TIMES), draw(ends), draw(ends), *(draw(layouts(stages, layers)) for _ in range(2))


def times(layer, embedding, head, layout):
    found = [layer * n for n in layout]
    found[0] += embedding
    found[-1] += head
    return found


@given(models())
def test_the_prediction_is_exact_if_all_layers_are_alike(model):
    *costs, before, after = model
    assert relaid(times(*costs, before), before, after) == pytest.approx(times(*costs, after))


@given(st.data())
def test_predictions_add_up_to_the_measured_times_and_are_positive(data):
    stages = data.draw(st.integers(1, 6))
    layers = data.draw(st.integers(stages, 40))
    before, after = (data.draw(layouts(stages, layers)) for _ in range(2))
    measured = data.draw(st.lists(TIMES, min_size=stages, max_size=stages))
    found = relaid(measured, before, after)
    assert math.fsum(found) == pytest.approx(math.fsum(measured)) and min(found) > 0
    assert by_stage(by_layer(measured, before), before) == pytest.approx(measured)


def test_with_two_stages_the_stage_with_the_smaller_time_per_layer_sets_the_time_of_a_layer():
    assert relaid([4.0, 7.0], (4, 4), (5, 3)) == pytest.approx([5.0, 6.0]), "a layer takes 1, and the head 3 of the 7"


def test_an_unchanged_layout_keeps_every_bit():
    measured = [0.1, 0.2, 0.3]
    assert relaid(measured, (3, 3, 1), (3, 3, 1)) == measured
