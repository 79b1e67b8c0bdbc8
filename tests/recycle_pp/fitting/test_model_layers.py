"""Layouts of decoder layers, as numbers and as lists."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle_pp.fitting.model_layers import ModelLayers
from recycle_pp.model.stage import Stage

from ..in_process import CPU, small

OWN = small(model__layers=8, parallel__stages=4)
GENERAL = small(model__kind="custom", model__layers="blocks", parallel__stages=2)
HF = {"model__kind": "hf", "model__layers": None}


def layout_of(counts, tied=()):
    """The protocol's layout of 8 layers: the embedding is layer -1, the head 8. tied: stages that hold layer 9."""
    ends = [sum(counts[: s + 1]) for s in range(len(counts))]
    found = {s: [*range(end - n, end)] for s, (end, n) in enumerate(zip(ends, counts, strict=True))}
    found[0].insert(0, -1)
    found[len(counts) - 1].append(8)
    for s in tied:
        found[s].insert(0, 9)
    return found


@st.composite
def counts(draw):
    cuts = sorted(draw(st.sets(st.integers(1, 7), min_size=3, max_size=3)))
    return tuple(b - a for a, b in zip((0, *cuts), (*cuts, 8), strict=True))


@given(counts(), counts(), st.booleans())
def test_a_move_changes_only_the_decoder_layers(before, after, ties):
    layers, tied = ModelLayers(OWN), (0, 3) if ties else ()
    assert layers.counts(layout_of(before, tied)) == before
    assert layers.relaid(layout_of(before, tied), after) == layout_of(after, tied)


@given(counts(), counts())
def test_each_layer_that_changes_its_stage_is_gained_by_one_stage(before, after):
    layers = ModelLayers(OWN)
    old, new = layout_of(before), layout_of(after)
    gained = layers.gained(before, after)
    for stage, of in enumerate(gained):
        assert of == [layer for layer in new[stage] if layer not in old[stage]]


def test_unknown_layers_have_no_layout():
    assert ModelLayers(OWN).counts({}) == ModelLayers(OWN).counts({0: [-1, 0, 1]}) == ()
    assert ModelLayers(OWN).settings(()) == OWN


def test_a_new_worker_builds_its_stage_in_the_present_layout():
    layers = ModelLayers(OWN)
    assert layers.start == (2, 2, 2, 2) and layers.settings((2, 2, 2, 2)) is OWN
    assert layers.settings((3, 1, 2, 2)).model.split == [3, 1, 2, 2]
    assert ModelLayers(layers.settings((3, 1, 2, 2))).start == (3, 1, 2, 2), "a run that starts with it"


def test_the_state_of_a_layer_has_three_floats_for_each_parameter():
    stage = Stage(small(model__layers=6, parallel__stages=2), 0, CPU)
    layers = ModelLayers(stage.settings)
    inner = sum(p.numel() for name, p in stage.parameters.items() if "layers.1." in name)
    assert layers.state_bytes([1], peers=3) == 12 * inner
    assert layers.state_bytes([1, 2], peers=3) == 24 * inner
    sharded = ModelLayers(small(model__layers=6, parallel__stages=2, parallel__sharded=True))
    assert sharded.state_bytes([1], peers=4) == 6 * inner, "two of four workers hold each unit"


def test_the_layers_of_other_models_become_known_from_a_workers_description():
    layers = ModelLayers(GENERAL)
    layout = {0: [-1, 0, 1], 1: [2, 3, 4]}
    assert layers.counts(layout) == () and layers.settings(()) is GENERAL
    layers.describe(4, None, {-1: [("wte.weight[0:9]", 90)], 0: [("blocks.0.w[0:2]", 5), ("blocks.0.b[0:2]", 1)]})
    assert layers.counts(layout) == (2, 2) == layers.start
    layers.describe(4, None, {2: [("blocks.2.w[0:2]", 7)], 3: [("w", 6)], 4: [("norm.weight[0:4]", 4)]})
    assert layers.relaid(layout, (1, 3)) == {0: [-1, 0], 1: [1, 2, 3, 4]}
    assert layers.settings((1, 3)).model.split == [1, 3]
    assert layers.state_bytes([0], peers=1) == 72 and layers.state_bytes([0, 2], peers=1) == 156


def test_the_layers_of_the_projects_transformer_are_known_without_a_worker():
    layers = ModelLayers(OWN)
    layers.describe(7, "they are stuck", {0: [("layers.0.norm", 1)]})
    assert layers.depth == 8 and layers.stays is None
    assert layers.state_bytes([0], 1) == layers.state_bytes([1], 1)


STUCK = "the layers of this model cannot move"


@pytest.mark.parametrize(
    ("changes", "stays", "words"),
    [
        ({"schedule__rebalance": "never"}, None, None),
        ({}, None, "8 decoder layers may move between stages while the job trains; the embedding, the final norm and"),
        ({"model__layers": 4}, None, "no layer can move, because each stage has one layer"),
        ({"parallel__stages": 1}, None, "no layer can move, because there is one stage"),
        ({"parallel__memory": "80GB"}, None, "8 decoder layers may move"),
        (HF, None, "8 decoder layers may move between stages while the job trains; modules outside them and"),
        (HF, STUCK, f"schedule.rebalance=auto: {STUCK}"),
        (HF | {"parallel__stages": 8}, STUCK, "no layer can move, because each stage has one layer"),
        (HF | {"parallel__memory": "80GB"}, None, "no layer moves with parallel.memory"),
    ],
)  # fmt: skip
def test_the_start_prints_which_layers_can_move(changes, stays, words):
    layers = ModelLayers(small(**{"model__layers": 8, "parallel__stages": 4, "schedule__rebalance": "auto"} | changes))
    layers.describe(8, stays, {})
    assert layers.what_moves is None if words is None else words in layers.what_moves
