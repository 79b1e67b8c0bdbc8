"""A checkpoint in a store is complete once it is sealed, wherever its parts were written."""

import queue
import threading

import pytest
import torch

from recycle_pp.state import checkpoint
from recycle_pp.state.stored import StoredCheckpoints, here
from recycle_pp.state.storing import Uploads
from recycle_pp.state.survey import main, survey
from recycle_pp.storage.store import Store, StoreError
from recycle_pp.wire.messages.saving import Seal, Sealed, Upload
from tests.recycle_pp.in_process import small

STATE = {
    "stage-0-0": {"model.a": torch.arange(6.0).reshape(2, 3), "model.b@0/2": torch.tensor([1.0, 2.0])},
    "stage-1-0": {"model.c": torch.ones(5), "model.b@2/2": torch.tensor([3.0, 4.0])},
}
WHOLE = {"model.a": STATE["stage-0-0"]["model.a"], "model.b": torch.arange(1.0, 5.0), "model.c": torch.ones(5)}


@pytest.fixture
def stored(tmp_path):
    return StoredCheckpoints(Store(f"{tmp_path}/store"))


def state(part):
    """The boxes of `model.b` as `Saver` writes them: NAME@OFFSETS/SHAPE."""
    return {name.replace("@0/2", "@0/4").replace("@2/2", "@2/4"): tensor for name, tensor in STATE[part].items()}


def written(folder, step):
    """Writes the parts of a checkpoint on the disks of two nodes. Returns part -> folder."""
    parts = {}
    for part in STATE:
        node = folder / part
        saved = checkpoint.Saver(node).save(step, part.removeprefix("stage-"), state(part)).result()
        parts[saved] = checkpoint.temporary(node, step) / saved
    return parts


def store(stored, folder, step, *, seals=True):
    """Uploads and seals a checkpoint without a common folder. Returns whether the seal was put."""
    parts = written(folder, step)
    files = {}
    for path in parts.values():
        files |= stored.upload(step, path)
    place = folder / "tables"
    stored.fetch_files(step, [file for file in files if not file.endswith(".distcp")], place)
    table, data = checkpoint.merged(place, list(parts))
    (place / ".metadata").write_bytes(table)
    return seals and stored.seal(step, {"run.seed": 7}, {f: files[f] for f in data}, place / ".metadata")


def lose_an_object(stored, step):
    stored.store.delete([next(path for path in stored.store.list(f"checkpoints/step-{step:06}") if ".distcp" in path)])


def test_a_checkpoint_of_two_nodes_is_loaded_from_a_third(stored, tmp_path):
    assert store(stored, tmp_path / "nodes", 20)
    path = here(stored.store.url, tmp_path / "third", 20)
    assert path == tmp_path / "third/step-000020"
    for name, tensor in checkpoint.load(path).items():
        assert torch.equal(tensor, WHOLE[name]), name
    checkpoint.refuse_mismatch(path, {"run.seed": 7})


def test_a_checkpoint_without_a_seal_does_not_exist(stored, tmp_path):
    store(stored, tmp_path / "a", 20)
    store(stored, tmp_path / "b", 40, seals=False)
    assert stored.steps() == [20] and survey(stored.store.url, 5).step == 20


def test_if_two_members_seal_one_succeeds_and_its_parts_are_kept(stored, tmp_path):
    assert store(stored, tmp_path / "a", 20)
    assert not store(stored, tmp_path / "b", 20)
    assert stored.damage(20) is None
    checkpoint.load(stored.fetch(20, tmp_path / "node"))


def test_a_seal_with_missing_parts_is_reported_and_replaced(stored, tmp_path):
    store(stored, tmp_path / "a", 20)
    store(stored, tmp_path / "b", 40)
    lose_an_object(stored, 40)
    found = survey(stored.store.url, 5)
    assert found.step == 20 and "does not exist" in found.damaged[40]
    assert store(stored, tmp_path / "c", 40)
    assert survey(stored.store.url, 5).step == 40


def test_only_the_newest_checkpoints_are_kept_with_their_parts(stored, tmp_path):
    for step in (20, 40, 60):
        store(stored, tmp_path / str(step), step)
    store(stored, tmp_path / "killed", 50, seals=False)
    store(stored, tmp_path / "going on", 80, seals=False)
    stored.prune(60, keep=2)
    assert stored.steps() == [40, 60]
    assert stored.store.folders("checkpoints") == {"sealed", "step-000040", "step-000060", "step-000080"}
    assert stored.damage(40) is stored.damage(60) is None


def test_after_a_restart_a_damaged_checkpoint_with_a_higher_number_does_not_count(stored, tmp_path):
    for step in (20, 40, 33):
        store(stored, tmp_path / str(step), step)
    lose_an_object(stored, 40)
    stored.prune(33, keep=1)
    assert stored.steps() == [33] and stored.damage(33) is None
    assert stored.store.folders("checkpoints") == {"sealed", "step-000033"}


def test_a_damaged_checkpoint_is_uploaded_again_when_the_job_has_repeated_its_steps(stored, tmp_path):
    """The worker is asked to upload and to seal, and has the parts of both nodes on its disk."""
    run, answers = tmp_path / "run", queue.SimpleQueue()
    settings = small(checkpoint__store=stored.store.url)
    uploads = Uploads(settings, str(run), {"run.seed": 7}, answers.put)
    for damaged in (False, True):
        saver = checkpoint.Saver(run / "checkpoints")
        parts = [saver.save(40, part.removeprefix("stage-"), state(part)).result() for part in STATE]
        checkpoint.finish(run / "checkpoints", 40, parts, {"run.seed": 7})
        uploads.asked(Upload(40, parts))
        files = answers.get(timeout=60).files
        uploads.asked(Seal(40, parts, files))
        assert answers.get(timeout=60) == Sealed(40)
        assert survey(stored.store.url, 5).step == 40
        if not damaged:
            lose_an_object(stored, 40)
            assert survey(stored.store.url, 5).step == 0
    uploads.asked(Upload(40, parts))  # repeated, because a link was lost
    assert answers.get(timeout=60) == Sealed(40)


def test_a_failing_store_does_not_count_as_a_damaged_checkpoint(stored, tmp_path, monkeypatch, capsys):
    for step in (20, 40):
        store(stored, tmp_path / str(step), step)
    sealed, head = stored.read(40), Store.head

    def denied(self, path):
        if ".distcp" in path:
            raise StoreError(f"{path}: ExpiredToken (the provided token has expired)")
        return head(self, path)

    monkeypatch.setattr(Store, "head", denied)
    monkeypatch.setattr(Store, "put_if_absent", lambda self, path, content: False)
    table = tmp_path / "40/tables/.metadata"
    for attempt in (
        lambda: stored.damage(40),
        lambda: stored.prune(20, keep=1),
        lambda: stored.seal(40, {}, sealed.files, table),
    ):
        with pytest.raises(StoreError, match="ExpiredToken"):
            attempt()
    assert main(stored.store.url, 5, probe=False) == 2 and "ExpiredToken" in capsys.readouterr().out
    assert stored.steps() == [20, 40] and stored.read(40) == sealed


def test_a_download_deletes_older_checkpoints_that_the_store_has_too(stored, tmp_path):
    node = tmp_path / "node"
    (node / "step-000010").mkdir(parents=True)  # not in the store
    for step in (20, 40, 60):
        store(stored, tmp_path / str(step), step)
        here(stored.store.url, node, step)
    assert sorted(path.name for path in node.iterdir() if path.is_dir()) == ["step-000010", "step-000060"]


def test_checkpoints_of_another_run_are_no_copies_and_are_kept(stored, tmp_path):
    """The folder's checkpoint has the same number of steps as one in the store."""
    node = tmp_path / "node"
    other = checkpoint.Saver(node).save(20, "0-0", {"model.a": torch.zeros(2, 3)}).result()
    checkpoint.finish(node, 20, [other], {"run.seed": 7})
    store(stored, tmp_path / "20", 20)
    assert not survey(stored.store.url, 5, folder=node).copied
    store(stored, tmp_path / "40", 40)
    here(stored.store.url, node, 40)
    assert torch.equal(checkpoint.load(node / "step-000020")["model.a"], torch.zeros(2, 3))
    assert survey(stored.store.url, 5, folder=node).copied


def test_the_checkpoint_with_the_lowest_loss_is_kept_in_addition_to_the_newest(stored, tmp_path):
    for step, losses in ((20, {}), (40, {20: 2.0}), (60, {40: 1.0}), (80, {60: float("nan")}), (100, {80: 3.0})):
        store(stored, tmp_path / str(step), step)
        stored.prune(step, 1, losses)
    assert stored.steps() == [40, 100]
    stored.prune(100, 1)
    assert stored.steps() == [100]


def test_if_a_listing_lacks_new_checkpoints_the_newest_is_found_and_none_of_them_is_deleted(
    stored, tmp_path, monkeypatch
):
    for step in (20, 40, 60):
        store(stored, tmp_path / str(step), step)
    listed = Store.list
    monkeypatch.setattr(Store, "list", lambda self, folder="": {
        path: size for path, size in listed(self, folder).items() if "sealed/step-000040" not in path
        and "sealed/step-000060" not in path
    })  # fmt: skip
    assert stored.steps() == [20, 60]
    stored.prune(60, keep=1)
    assert stored.steps() == [60] and stored.damage(40) is stored.damage(60) is None


def test_an_object_with_other_bytes_is_refused(stored, tmp_path):
    store(stored, tmp_path / "a", 20)
    path = next(path for path in stored.store.list("checkpoints/step-000020") if ".distcp" in path)
    content = bytearray(stored.store.get(path))
    content[-1] ^= 1
    stored.store.put(path, bytes(content))
    with pytest.raises(ValueError, match=f"{path} is damaged: it has a wrong checksum"):
        here(stored.store.url, tmp_path / "node", 20)
    assert not (tmp_path / "node/step-000020").exists()


def test_the_processes_of_a_node_download_once(stored, tmp_path, monkeypatch):
    store(stored, tmp_path / "a", 20)
    downloads, fetch = [], Store.get_file
    monkeypatch.setattr(Store, "get_file", lambda self, *args: (downloads.append(args[0]), fetch(self, *args)))
    node = tmp_path / "node"
    threads = [threading.Thread(target=here, args=(stored.store.url, node, 20)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(downloads) == len(set(downloads)) == 2


def test_a_folder_of_another_run_with_the_same_number_of_steps_is_replaced(stored, tmp_path):
    store(stored, tmp_path / "a", 20)
    other = checkpoint.Saver(tmp_path / "node").save(20, "0-0", {"model.a": torch.zeros(2, 3)}).result()
    checkpoint.finish(tmp_path / "node", 20, [other], {"run.seed": 7})
    assert torch.equal(checkpoint.load(here(stored.store.url, tmp_path / "node", 20))["model.c"], torch.ones(5))


def test_a_checkpoint_that_is_only_on_the_disk_is_loaded_from_there(stored, tmp_path):
    part = checkpoint.Saver(tmp_path / "node").save(20, "0-0", {"model.c": torch.ones(5)}).result()
    with pytest.raises(ValueError, match=r"this node's disk has no .*step-000020, and .* does not exist"):
        here(stored.store.url, tmp_path / "node", 20)
    checkpoint.finish(tmp_path / "node", 20, [part], {})
    assert here(stored.store.url, tmp_path / "node", 20) == tmp_path / "node/step-000020"
