"""A stage that gained or lost layers, or became another stage, has the bits of one with these layers from the start."""

import weakref

import pytest
from torch.multiprocessing.reductions import StorageWeakRef

from recycle_pp.wire.messages.units import UnitId
from tests.recycle_pp.in_process import small
from tests.recycle_pp.moving import Pipeline, moves, takes_over

KINDS = {
    "float sums, autocast": {"numerics__precision": "bf16-autocast", "optimizer__groups": ["layers.2.*:0.3"]},
    "int64 sums, tied": {"numerics__reproducible": True, "model__tied": True, "model__dropout": 0.2},
    "int32 sums, bf16": {
        "numerics__reproducible": True, "numerics__sums": "int32", "numerics__precision": "bf16",
        "model__recompute": True,
    },
    "Muon": {"optimizer__name": "muon", "numerics__reproducible": True},
    "seals": {"control__mismatch": "third"},
}  # fmt: skip
WAYS = [(kind, whole) for kind in KINDS for whole in (False, True)]


@pytest.mark.parametrize(("kind", "whole"), WAYS[:-1])  # only sharded state has seals
def test_layers_that_move_there_and_back_change_no_bit(kind, whole):
    config = small(model__layers=5, parallel__microbatches=2, **KINDS[kind])
    moves(Pipeline(config, [2, 2, 1], whole), Pipeline(config, [1, 2, 2], whole))


@pytest.mark.parametrize(
    ("kind", "whole", "understudy", "to"),
    [(*way, 0, 2) for way in WAYS[:-1]] + [("int64 sums, tied", True, *pair) for pair in ((2, 0), (1, 2), (0, 1))],
)
def test_a_stage_that_becomes_another_stage_in_the_middle_of_a_step_has_its_bits(kind, whole, understudy, to):
    config = small(model__layers=5, parallel__microbatches=2, **KINDS[kind])
    takes_over([Pipeline(config, [2, 1, 2], whole) for _ in range(3)], understudy, to)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "sharded"])
def test_a_layer_that_stays_is_not_copied_and_one_that_leaves_is_freed(whole, precision):
    config = small(model__layers=5, numerics__precision=precision, numerics__reproducible=True)
    pipeline = Pipeline(config, [3, 2], whole)
    pipeline.step(0)
    first, second = pipeline.stages
    held = pipeline.optimizers[0].held

    def addresses():
        stays = first.layout.number(UnitId(1, 0))
        return [of.data_ptr() for of in (*held[stays].state, first.working[first.layout.spans[stays]])]

    before = addresses()
    tensors = [first.working.parts[3], *held[first.layout.number(UnitId(2, 0))].state]
    gone = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
    layer = weakref.ref(first.module.module.layers["2"])
    del tensors
    pipeline.begin([2, 3], newest=0)
    arrived = pipeline.coming[1].tensors.working.parts[0].data_ptr()
    pipeline.switch()
    held = pipeline.optimizers[0].held
    assert addresses() == before and second.working.parts[0].data_ptr() == arrived
    assert layer() is None and all(of.expired() for of in gone)
