"""What a worker of sharded state saves."""

import time
from types import SimpleNamespace

import pytest
from recycle_schedules import Worker

from recycle_pp.data.batches import Batches
from recycle_pp.model.stage import Stage
from recycle_pp.numerics.shards import ShardedOptimizer
from recycle_pp.state.saving import StageSaving
from recycle_pp.wire.messages.workers import Save, Saved, SaveFailed

from ..in_process import CPU, small
from ..numerics.test_shards import flip


@pytest.mark.parametrize("changed", [False, True])
def test_who_is_asked_for_all_that_it_holds_refuses_what_has_changed_since_the_commit(changed, tmp_path):
    """Another holder has died, so no other copy may be there to compare with."""
    config, said = small(parallel__pipelines=2, parallel__sharded=True, control__mismatch="third"), []
    stage = Stage(config, 0, CPU)
    optimizer = ShardedOptimizer(config, stage)
    blocks = range(len(stage.layout.blocks))
    for block in blocks:
        optimizer.begin(block)
    optimizer.start_step(blocks, blocks)
    strike = lambda moment, step: None  # noqa: E731
    saving = StageSaving(config, str(tmp_path), stage, optimizer, Batches(config), Worker(0, 0), said.append, strike)
    saving.committed(SimpleNamespace(step=3, savers=[], last=True), None)
    if changed:
        flip(optimizer.shards[1].mean, 5, 7)
    saving.asked(Save(4))
    deadline = time.monotonic() + 30
    while not said and time.monotonic() < deadline:
        time.sleep(0.01)
    (answer,) = said
    assert isinstance(answer, SaveFailed if changed else Saved)
    assert not changed or "has changed since its update" in answer.detail
