"""A unit of state that is held and updated alone has the same bits as in a whole stage."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle_pp.model.stage import Stage
from recycle_pp.numerics.layout import Layout, depth_of
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.state import checkpoint
from recycle_pp.state.checkpoint_tensors import boxes, pieces, tensors_of

from ..in_process import CPU, everything, gradient, part, small

SHAPES = st.dictionaries(
    st.sampled_from("abcd"), st.lists(st.integers(1, 24), min_size=1, max_size=3).map(tuple), min_size=1
)


@given(SHAPES, st.integers(128, 4000))
def test_units_fill_the_vector_in_order_at_aligned_positions(shapes, block):
    layout = Layout(shapes, lambda *_: block)
    ends = [0]
    for span in layout.spans:
        assert span.start == ends[-1] and span.start % 128 == 0
        ends.append(span.stop)
    assert ends[-1] == layout.size


@settings(max_examples=30, deadline=None)
@given(SHAPES, st.integers(128, 2000))
def test_the_boxes_of_its_units_cover_a_tensor(shapes, block):
    layout = Layout(shapes, lambda *_: block)
    flat = torch.arange(layout.size, dtype=torch.float32)
    for index, tensor in enumerate(layout.views(flat)):
        rebuilt = torch.full_like(tensor, -1)
        for number, about in enumerate(layout.units):
            if about.tensor == index:
                matrix = layout.units_of(flat)[number]
                for offsets, piece in boxes(tensor.shape, about.rows, matrix, depth_of(tensor.shape)):
                    assert piece.dim() == tensor.dim()
                    places = tuple(slice(o, o + n) for o, n in zip(offsets, piece.shape, strict=True))
                    assert (rebuilt[places] == -1).all(), "no element is in two boxes"
                    rebuilt[places] = piece
        assert torch.equal(rebuilt, tensor)


def cut(stage, block):
    """Cuts the stage's state into units of `block` elements. None: one unit per tensor, the default of small models.

    Tensors that their update rule needs whole stay whole.
    """
    own = stage.layout.cut
    layers = [*stage.module.layers.values()]
    stage.layout = Layout(stage.module.shapes, lambda *of: None if own(*of) is None else block, layers)
    parts = [stage.module.parts.get(name, 1) for name in stage.names]
    stage.gradients.relayout(stage.layout, [], parts, stage.module.shared)
    return stage


@pytest.mark.parametrize(
    ("optimizer", "precision", "moments"),
    [("adamw", "fp32", "fp32"), ("adamw", "bf16", "bf16"), ("muon", "bf16", "fp32"), ("muon", "fp32", "bf16")],
)
@settings(max_examples=8, deadline=None)
@given(st.integers(128, 1200), st.sampled_from([None, 0.3, 1.0]))
def test_updates_of_single_units_have_the_bits_of_the_whole(optimizer, precision, moments, block, scale):
    config = small(
        numerics__precision=precision, optimizer__groups=["*norm*:0.5:2", "layers.0.*:0.3"], parallel__pipelines=2,
        optimizer__name=optimizer, optimizer__moments=moments,
    )  # fmt: skip
    one, many = (cut(Stage(config, 0, CPU), block) for _ in range(2))
    whole, sharded = StageOptimizer(config, one), StageOptimizer(config, many, whole=False)
    units = range(len(many.layout.units))
    for unit in units:
        sharded.begin(unit)
    sharded.settled()
    for step in range(3):
        reduced = gradient(one, step)
        whole.step(reduced, step, scale)
        sharded.step(part(many, reduced, units), step, scale)
    assert torch.equal(one.working.joined(), many.working.joined())
    state = everything(whole)
    for key, piece in pieces(sharded, many, units).items():
        name, _, place = key.rpartition("@")
        if not name:
            assert torch.equal(state[key], piece)
            continue
        offsets = [int(o) for o in place.split("/")[0].split(",")]
        places = tuple(slice(o, o + n) for o, n in zip(offsets, piece.shape, strict=True))
        assert torch.equal(state[name][places], piece)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2), st.integers(0, 5000), st.integers(0, 31))
def test_a_bit_flip_changes_only_the_checksum_of_its_unit(vector, place, bit):
    optimizer, stage = begun("stop", 1024)
    reduced = every(stage, 0)
    before, _ = optimizer.inspected(reduced)
    flip(optimizer.vectors(3)[vector], place, bit)
    after, changed = optimizer.inspected(reduced)
    assert [k for k in before if before[k] != after[k]] == [3] and not changed, "nothing is sealed"


@pytest.mark.parametrize("moment", ["before an update", "after it", "never"])
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2), st.integers(0, 5000), st.integers(0, 31))
def test_a_worker_reports_its_units_that_changed_without_an_update(moment, vector, place, bit):
    optimizer, stage = begun("third", 1024)
    for step in range(3):
        reduced = every(stage, step)
        assert optimizer.inspected(reduced)[1] == []
        if (moment, step) == ("before an update", 2):
            flip(optimizer.vectors(3)[vector], place, bit)
        optimizer.step(reduced, step, 1.0)
        if (moment, step) == ("after it", 2):
            flip(optimizer.vectors(3)[vector], place, bit)
    assert optimizer.inspected(every(stage, 3))[1] == ([] if moment == "never" else [3])


@pytest.mark.parametrize("follows", [False, True])
def test_a_worker_with_a_copy_detects_a_change_before_the_copy(follows):
    (one, stage), (other, there) = begun("third", 1024), begun("third", 1024)
    flip(one.vectors(3)[1], 5, 7)
    if follows:
        other.start_following()
        other.take(range(len(stage.layout.units)), one.copy(stage.layout.ids, newest=-1))
        other.follow(every(there, 0), 0, 1.0)
    else:
        for unit in (2, 3):
            room = other.room(unit)
            for to, source in zip(room, one.given(unit), strict=True):
                to.copy_(source)
            other.put(unit, room)
    assert other.inspected(every(there, 1))[1] == [3]


def test_a_changed_unit_is_not_saved_and_checksums_at_a_checkpoint_cover_moments():
    (one, stage), (other, _) = begun("third", 1024), begun("stop", 1024)
    assert one.checksums() == other.checksums()
    for optimizer in (one, other):
        flip(optimizer.vectors(3)[2], 5, 7)
    differ = [unit for unit, of in begun("stop", 1024)[0].checksums().items() if other.checksums()[unit] != of]
    assert differ == [3]
    name = stage.layout.unit_names[3]
    with pytest.raises(RuntimeError, match=re.escape(f"its copy of {name} has changed since its update")):
        one.checksums()


def begun(mismatch, size):
    """An optimizer that holds all units of a stage one by one, and the stage."""
    config = small(parallel__pipelines=2, control__mismatch=mismatch)
    stage = cut(Stage(config, 0, CPU), size)
    optimizer = StageOptimizer(config, stage, whole=False)
    for unit in range(len(stage.layout.units)):
        optimizer.begin(unit)
    return optimizer, stage


def every(stage, step):
    """A gradient of all units of the stage, for a worker that holds them one by one."""
    return gradient(stage, step, range(len(stage.layout.units)))


def flip(vector, place, bit):
    struck = vector.view(torch.int32)
    struck[place % len(struck)] ^= (1 << bit) - (bit == 31) * (1 << 32)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_copy_of_a_unit_may_arrive_while_micro_batches_are_in_flight(precision):
    """The copy has the same bits as before, so autograd can continue."""
    stage = Stage(small(parallel__pipelines=2, numerics__precision=precision), 0, CPU)
    optimizer = StageOptimizer(stage.settings, stage, whole=False)
    product = sum((parameter.float() ** 2).sum() for parameter in stage.parameters.values())
    before = stage.working.joined()
    for block, span in enumerate(stage.layout.spans):
        optimizer.put(block, [part.copy_(stage.flat[span]) for part in optimizer.room(block)])
    assert torch.equal(stage.working.joined(), before)
    product.backward()


def test_a_unit_without_an_update_is_dropped():
    config = small(parallel__pipelines=2)
    stage = Stage(config, 0, CPU)
    optimizer = StageOptimizer(config, stage, whole=False)
    for unit in range(3):
        optimizer.begin(unit)
    optimizer.step(gradient(stage, 0, [0, 2]), 0, None)
    assert sorted(optimizer.held) == [0, 2]


@pytest.mark.parametrize(
    ("name", "precision", "moments"),
    [("adamw", "fp32", "fp32"), ("adamw", "bf16", "bf16"), ("muon", "fp32", "fp32"), ("muon", "bf16", "bf16")],
)
@settings(max_examples=8, deadline=None)
@given(st.integers(128, 1200), st.sampled_from([None, 0.3, 1.0]))
def test_a_rolled_back_step_leaves_no_bit_changed_and_a_confirmed_one_has_the_bits_of_the_commit(
    name, precision, moments, block, scale
):
    config = small(
        optimizer__name=name, numerics__precision=precision, numerics__reproducible=True, parallel__pipelines=2,
        optimizer__moments=moments,
    )  # fmt: skip
    plain, ahead = (cut(Stage(config, 0, CPU), block) for _ in range(2))
    at_commit, early = (StageOptimizer(config, stage, whole=False) for stage in (plain, ahead))
    units = range(len(plain.layout.units))
    for optimizer in (at_commit, early):
        for unit in units:
            optimizer.begin(unit)
        optimizer.settled()

    def bits():
        tensors = [*ahead.working.parts, ahead.gradients.exponents, *(t for unit in units for t in early.vectors(unit))]
        return [tensor.clone() for tensor in tensors]

    for step in range(3):
        reduced = gradient(plain, step, units)
        at_commit.step(reduced, step, scale)
        before, checksums = bits(), early.inspected(reduced)
        early.speculate(reduced, step)
        assert early.inspected(reduced) == checksums, "a repeated vote equals the first one"
        assert not all(map(torch.equal, before, bits()))
        if scale == 1.0:
            early.confirm()
        else:
            early.undo()
            assert all(map(torch.equal, before, bits()))
            early.step(reduced, step, scale)
        assert torch.equal(plain.working.joined(), ahead.working.joined())
        assert torch.equal(plain.gradients.exponents, ahead.gradients.exponents)
    assert all(torch.equal(x, y) for k in units for x, y in zip(at_commit.vectors(k), early.vectors(k), strict=True))


def test_a_rolled_back_step_keeps_units_that_it_did_not_update():
    config = small(parallel__pipelines=2)
    stage = Stage(config, 0, CPU)
    optimizer = StageOptimizer(config, stage, whole=False)
    for unit in range(3):
        optimizer.begin(unit)
    reduced = gradient(stage, 0, [0, 2])
    optimizer.speculate(reduced, 0)
    optimizer.undo()
    assert sorted(optimizer.held) == [0, 1, 2], "another worker may need a copy"
    optimizer.speculate(reduced, 0)
    optimizer.confirm()
    assert sorted(optimizer.held) == [0, 2]


def test_a_checkpoint_of_units_has_whole_tensors_and_names_missing_ones(tmp_path):
    config = small(parallel__pipelines=2, numerics__reproducible=True)
    stage = cut(Stage(config, 0, CPU), 128)
    optimizer = StageOptimizer(config, stage, whole=False)
    units = range(len(stage.layout.units))
    for unit in units:
        optimizer.begin(unit)
        mean = optimizer.vectors(unit)[1]
        mean.copy_(torch.rand_like(mean))

    def save(step, of, saved):
        return checkpoint.Saver(tmp_path).save(step, of, pieces(optimizer, stage, saved), tensors_of(stage)).result()

    odd, even = ([u for u in units if u % 2 == left] for left in (1, 0))
    both = [save(4, "0.0", odd), save(4, "1.0", even)]
    with pytest.raises(ValueError, match=r"was not saved|were saved, because workers that held the rest died"):
        checkpoint.finish(tmp_path, 5, [save(5, "0.0", even)], {})
    with pytest.raises(
        ValueError, match=f"exp_avg.{stage.names[0]} was not saved, because all workers that held it died"
    ):
        checkpoint.finish(tmp_path, 6, [save(6, "0.0", [units[-1]])], {})
    found = checkpoint.load(checkpoint.finish(tmp_path, 4, both, {}))
    assert {name for name in found if not name.startswith("exponent.")} == {
        f"{prefix}.{name}" for prefix in ("model", "exp_avg", "exp_avg_sq") for name in stage.names
    }
    for name, shape in zip(stage.names, stage.layout.shapes, strict=True):
        assert found[f"exp_avg.{name}"].shape == shape
    again = cut(Stage(config, 0, CPU), 300)  # with other units, or uncut
    other = StageOptimizer(config, again, whole=False)
    other.resume(lambda names: {name: found[name] for name in names})
    for unit in range(len(again.layout.units)):
        other.begin(unit)
    flat = torch.cat([other.vectors(unit)[1] for unit in sorted(other.held)])
    for name, view in zip(again.names, again.layout.views(flat), strict=True):
        assert torch.equal(view, found[f"exp_avg.{name}"])
    at_once = Stage(config, 0, CPU)
    whole = StageOptimizer(config, at_once)
    whole.resume(lambda names: {name: found[name] for name in names})
    assert all(torch.equal(tensor, found[name]) for name, tensor in whole.state().items())
    assert {*pieces(whole, at_once, range(len(at_once.layout.units)))} == {*found}, "its tensors are in one piece"
