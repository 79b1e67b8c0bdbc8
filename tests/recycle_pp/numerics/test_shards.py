"""A block that is held and updated by itself has the bits that it has in the whole."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle_pp.model.stage import Stage
from recycle_pp.numerics.layout import Layout, depth_of
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.numerics.shards import ShardedOptimizer, _boxes
from recycle_pp.state import checkpoint

from ..in_process import CPU, everything, gradient, small

SHAPES = st.dictionaries(
    st.sampled_from("abcd"), st.lists(st.integers(1, 24), min_size=1, max_size=3).map(tuple), min_size=1
)


@given(SHAPES, st.integers(128, 4000))
def test_blocks_take_the_vector_one_after_the_other_at_multiples_of_the_alignment(shapes, block):
    layout = Layout(shapes, block)
    ends = [0]
    for span in layout.spans:
        assert span.start == ends[-1] and span.start % 128 == 0
        ends.append(span.stop)
    assert ends[-1] == layout.size


@settings(max_examples=30, deadline=None)
@given(SHAPES, st.integers(128, 2000))
def test_a_tensor_is_the_boxes_that_its_blocks_are_cut_into(shapes, block):
    layout = Layout(shapes, block)
    flat = torch.arange(layout.size, dtype=torch.float32)
    for index, tensor in enumerate(layout.views(flat)):
        rebuilt = torch.full_like(tensor, -1)
        for number, about in enumerate(layout.blocks):
            if about.tensor == index:
                matrix = layout.blocks_of(flat)[number]
                for offsets, piece in _boxes(tensor.shape, about.rows, matrix, depth_of(tensor.shape)):
                    assert piece.dim() == tensor.dim()
                    places = tuple(slice(o, o + n) for o, n in zip(offsets, piece.shape, strict=True))
                    assert (rebuilt[places] == -1).all(), "no element is in two boxes"
                    rebuilt[places] = piece
        assert torch.equal(rebuilt, tensor)


def cut(stage, block):
    """The stage with smaller blocks: a small model has one a tensor."""
    stage.layout = Layout(stage.module.shapes, block)
    stage.gradients.places = stage.ops.places(stage.layout, CPU)
    stage.gradients._layout = stage.layout
    if stage.ties is not None:
        stage.ties._layout = stage.layout
    return stage


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@settings(max_examples=8, deadline=None)
@given(st.integers(128, 1200), st.sampled_from([None, 0.3, 1.0]))
def test_updates_of_single_blocks_have_the_bits_of_the_whole(precision, block, scale):
    config = small(
        numerics__precision=precision, optimizer__groups=["*norm*:0.5:2", "layers.0.*:0.3"], parallel__pipelines=2
    )
    one, many = (cut(Stage(config, 0, CPU), block) for _ in range(2))
    whole, sharded = StageOptimizer(config, one), ShardedOptimizer(config, many)
    blocks = range(len(many.layout.blocks))
    for number in blocks:
        sharded.begin(number)
    sharded.settled()
    for step in range(3):
        reduced = gradient(one, step)
        if scale is not None:
            whole.step(reduced, step, scale)
        sharded.start_step(blocks, blocks)
        for number, span in enumerate(many.layout.spans):
            sharded.shards[number].grad.copy_(reduced.flat[span])
        sharded.step(reduced, step, scale)
    assert torch.equal(one.working, many.working)
    state = everything(whole)
    for key, piece in sharded.pieces().items():
        name, _, place = key.rpartition("@")
        offsets = [int(o) for o in place.split("/")[0].split(",")]
        places = tuple(slice(o, o + n) for o, n in zip(offsets, piece.shape, strict=True))
        assert torch.equal(state[name][places], piece)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2), st.integers(0, 5000), st.integers(0, 31))
def test_any_bit_that_flips_changes_the_checksum_of_its_block_alone(vector, place, bit):
    optimizer, blocks, _ = begun("stop", 1024)
    optimizer.start_step(blocks, blocks)
    before, _ = optimizer.inspected()
    flip(optimizer.shards[3].state[vector], place, bit)
    after, changed = optimizer.inspected()
    assert [k for k in before if before[k] != after[k]] == [3] and not changed, "nothing is sealed"


@pytest.mark.parametrize("moment", ["before an update", "after it", "never"])
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2), st.integers(0, 5000), st.integers(0, 31))
def test_a_worker_says_itself_which_blocks_something_other_than_an_update_has_changed(moment, vector, place, bit):
    optimizer, blocks, stage = begun("third", 1024)
    for step in range(3):
        optimizer.start_step(blocks, blocks)
        assert optimizer.inspected()[1] == []
        if (moment, step) == ("before an update", 2):
            flip(optimizer.shards[3].state[vector], place, bit)
        update(optimizer, stage, step)
        if (moment, step) == ("after it", 2):
            flip(optimizer.shards[3].state[vector], place, bit)
    optimizer.start_step(blocks, blocks)
    assert optimizer.inspected()[1] == ([] if moment == "never" else [3])


def test_what_has_changed_before_it_was_copied_is_known_to_whoever_has_the_copy():
    (one, blocks, _), (other, *_) = begun("third", 1024), begun("third", 1024)
    flip(one.shards[3].mean, 5, 7)
    for block in (2, 3):
        room = other.room(block)
        for to, source in zip(room, one.given(block), strict=True):
            to.copy_(source)
        other.put(block, room)
    other.start_step(blocks, blocks)
    assert other.inspected()[1] == [3]


def test_a_block_that_has_changed_is_not_saved_and_checksums_of_a_checkpoint_tell_moments_apart():
    (one, blocks, _), (other, *_) = begun("third", 1024), begun("stop", 1024)
    assert one.checksums() == other.checksums()
    for optimizer in (one, other):
        optimizer.start_step(blocks, blocks)
        flip(optimizer.shards[3].square, 5, 7)
    differ = [name for name, of in begun("stop", 1024)[0].checksums().items() if other.checksums()[name] != of]
    assert differ == [f"state of {other.names[3]}"]
    with pytest.raises(RuntimeError, match=re.escape(f"its copy of {one.names[3]} has changed since its update")):
        one.checksums()


def begun(mismatch, size):
    """An optimizer that holds all blocks of a stage, these, and the stage."""
    config = small(parallel__pipelines=2, control__mismatch=mismatch)
    stage = cut(Stage(config, 0, CPU), size)
    optimizer = ShardedOptimizer(config, stage)
    blocks = range(len(stage.layout.blocks))
    for number in blocks:
        optimizer.begin(number)
    return optimizer, blocks, stage


def flip(vector, place, bit):
    struck = vector.view(torch.int32)
    struck[place % len(struck)] ^= (1 << bit) - (bit == 31) * (1 << 32)


def update(optimizer, stage, step):
    reduced = gradient(stage, step)
    for number, span in enumerate(stage.layout.spans):
        optimizer.shards[number].grad.copy_(reduced.flat[span])
    optimizer.step(reduced, step, 1.0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_copy_of_a_block_comes_while_micro_batches_are_in_flight(precision):
    """Its bits are those that they have computed with, so autograd may go on."""
    stage = Stage(small(parallel__pipelines=2, numerics__precision=precision), 0, CPU)
    optimizer = ShardedOptimizer(stage.settings, stage)
    product = sum((parameter.float() ** 2).sum() for parameter in stage.parameters.values())
    before = stage.working.clone()
    for block, span in enumerate(stage.layout.spans):
        optimizer.put(block, [part.copy_(stage.flat[span]) for part in optimizer.room(block)])
    assert torch.equal(stage.working, before)
    product.backward()


def test_what_is_not_updated_is_out_of_date_and_goes():
    config = small(parallel__pipelines=2)
    stage = Stage(config, 0, CPU)
    optimizer = ShardedOptimizer(config, stage)
    for number in range(3):
        optimizer.begin(number)
    optimizer.start_step([0, 2], [0])
    optimizer.step(gradient(stage, 0), 0, None)
    assert sorted(optimizer.shards) == [0, 2]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@settings(max_examples=8, deadline=None)
@given(st.integers(128, 1200), st.sampled_from([None, 0.3, 1.0]))
def test_a_step_that_was_taken_back_leaves_no_bit_behind_and_one_that_stands_has_those_of_the_commit(
    precision, block, scale
):
    config = small(numerics__precision=precision, numerics__reproducible=True, parallel__pipelines=2)
    plain, ahead = (cut(Stage(config, 0, CPU), block) for _ in range(2))
    at_commit, early = ShardedOptimizer(config, plain), ShardedOptimizer(config, ahead)
    blocks = range(len(plain.layout.blocks))
    for optimizer in (at_commit, early):
        for number in blocks:
            optimizer.begin(number)
        optimizer.settled()

    def bits():
        tensors = [ahead.working, ahead.gradients.exponents, *(t for s in early.shards.values() for t in s.state)]
        return [tensor.clone() for tensor in tensors]

    for step in range(3):
        reduced = gradient(plain, step)
        for optimizer in (at_commit, early):
            optimizer.start_step(blocks, blocks)
            for number, span in enumerate(plain.layout.spans):
                optimizer.shards[number].grad.copy_(reduced.flat[span])
        at_commit.step(reduced, step, scale)
        before, checksums = bits(), early.inspected()
        early.speculate(reduced, step)
        assert early.inspected() == checksums, "a vote that is repeated says what the first one said"
        assert not all(map(torch.equal, before, bits()))
        if scale == 1.0:
            early.confirm()
        else:
            early.undo()
            assert all(map(torch.equal, before, bits()))
            early.step(reduced, step, scale)
        assert torch.equal(plain.working, ahead.working)
        assert torch.equal(plain.gradients.exponents, ahead.gradients.exponents)
    assert all(
        torch.equal(x, y) for k in blocks for x, y in zip(at_commit.shards[k].state, early.shards[k].state, strict=True)
    )


def test_a_step_that_was_taken_back_keeps_blocks_that_it_did_not_update():
    config = small(parallel__pipelines=2)
    stage = Stage(config, 0, CPU)
    optimizer = ShardedOptimizer(config, stage)
    for number in range(3):
        optimizer.begin(number)
    optimizer.start_step([0, 2], [0])
    for number in (0, 2):
        optimizer.shards[number].grad.fill_(1.0)
    optimizer.speculate(gradient(stage, 0), 0)
    optimizer.undo()
    assert sorted(optimizer.shards) == [0, 1, 2], "another worker may need a copy"
    optimizer.speculate(gradient(stage, 0), 0)
    optimizer.confirm()
    assert sorted(optimizer.shards) == [0, 2]


def test_a_checkpoint_of_blocks_is_one_of_whole_tensors_and_says_when_some_are_missing(tmp_path):
    config = small(parallel__pipelines=2, numerics__reproducible=True)
    stage = cut(Stage(config, 0, CPU), 128)
    optimizer = ShardedOptimizer(config, stage)
    blocks = range(len(stage.layout.blocks))
    for number in blocks:
        optimizer.begin(number)
        optimizer.shards[number].mean.copy_(torch.rand_like(optimizer.shards[number].mean))

    def save(step, part):
        return checkpoint.Saver(tmp_path).save(step, part, optimizer.pieces(), optimizer.tensors).result()

    both = []
    for part, first in (("0.0", [b for b in blocks if b % 2]), ("1.0", [b for b in blocks if not b % 2])):
        optimizer.start_step(blocks, first)
        both.append(save(4, part))
    with pytest.raises(ValueError, match="were saved: the holders of the others have died"):
        checkpoint.finish(tmp_path, 5, [save(5, "0.0")], {})
    optimizer.start_step(blocks, [blocks[-1]])
    with pytest.raises(ValueError, match=f"nothing of exp_avg.{stage.names[0]} was saved: its holders have died"):
        checkpoint.finish(tmp_path, 6, [save(6, "0.0")], {})
    found = checkpoint.load(checkpoint.finish(tmp_path, 4, both, {}))
    assert {name for name in found if not name.startswith("exponent.")} == {
        f"{prefix}.{name}" for prefix in ("model", "exp_avg", "exp_avg_sq") for name in stage.names
    }
    for name, shape in zip(stage.names, stage.layout.shapes, strict=True):
        assert found[f"exp_avg.{name}"].shape == shape
    again = cut(Stage(config, 0, CPU), 300)  # cut otherwise, or not at all
    other = ShardedOptimizer(config, again)
    other.resume(lambda names: {name: found[name] for name in names})
    for number in range(len(again.layout.blocks)):
        other.begin(number)
    flat = torch.cat([other.shards[number].mean for number in sorted(other.shards)])
    for name, view in zip(again.names, again.layout.views(flat), strict=True):
        assert torch.equal(view, found[f"exp_avg.{name}"])
