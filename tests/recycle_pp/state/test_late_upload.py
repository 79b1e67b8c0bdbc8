"""A checkpoint that is only on one node's disk is brought into the store, from where all nodes can load it."""

import json

import pytest
import torch

from recycle_pp.config.settings import Checkpoint
from recycle_pp.state import checkpoint
from recycle_pp.state.late_upload import upload_late
from recycle_pp.state.stored import StoredCheckpoints, here
from recycle_pp.storage.store import Store, StoreError


@pytest.fixture
def stored(tmp_path):
    return StoredCheckpoints(Store(f"{tmp_path}/store"))


def finished(folder, step):
    """A finished checkpoint in `folder`."""
    part = checkpoint.Saver(folder).save(step, "0-0", {"model.w": torch.full((3,), float(step))}).result()
    return checkpoint.finish(folder, step, [part], {"run.seed": 7})


def test_a_checkpoint_that_only_one_node_has_can_be_loaded_from_another(stored, tmp_path):
    path = finished(tmp_path / "a", 60)
    for _ in range(2):  # the second call does nothing
        upload_late(stored.store.url, path, Checkpoint())
    loaded = checkpoint.load(here(stored.store.url, tmp_path / "b", 60))
    assert torch.equal(loaded["model.w"], torch.full((3,), 60.0))
    assert json.loads((path / "about.json").read_text()) == stored.read(60).about, (
        "it is a copy, so it is never fetched"
    )


def test_the_store_keeps_the_newest_checkpoints_and_the_one_with_the_lowest_loss(stored, tmp_path):
    lines = [{"step": step - 1, "val_loss": loss} for step, loss in ((20, 1.0), (40, 3.0), (60, 2.0))]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for step in (20, 40, 60):
        upload_late(stored.store.url, finished(tmp_path / "a", step), Checkpoint(keep=1, keep_best=True))
    assert stored.steps() == [20, 60]


def test_a_store_that_refuses_is_reported_in_one_sentence(tmp_path):
    (tmp_path / "store").write_text("a file")
    with pytest.raises(StoreError, match=f"{tmp_path}/store"):
        upload_late(f"{tmp_path}/store", finished(tmp_path / "a", 60), Checkpoint())
