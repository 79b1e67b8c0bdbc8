"""Checkpoints can be loaded by any split, are complete or absent, and never unpickle foreign classes."""

import errno
import json
import os
import pickle
import shutil
import signal
import time
from enum import Enum
from io import BytesIO
from pathlib import Path, PosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorProperties

from recycle_pp.coordinator.checkpoints import newest_of, newest_whole
from recycle_pp.model.stage import Stage
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.state import checkpoint, checksum
from recycle_pp.state.checksum import damage
from recycle_pp.state.survey import Survey
from recycle_pp.state.table_of_contents import read_table
from recycle_pp.telemetry.checkpoint_folders import finished, unfinished
from tests.recycle_pp.in_process import CPU, everything, gradient, same, small

ABOUT = checkpoint.describe(small(), "text")


def job(stages: int, steps: int = 0) -> list[StageOptimizer]:
    """The optimizers of all stages after `steps` steps."""
    settings = small(parallel__stages=stages, numerics__reproducible=True)
    optimizers = []
    for number in range(stages):
        stage = Stage(settings, number, CPU)
        optimizers.append(StageOptimizer(settings, stage))
        for step in range(steps):
            optimizers[-1].step(gradient(stage, step), step)
    return optimizers


def state(optimizers) -> dict[str, torch.Tensor]:
    return {name: t for optimizer in optimizers for name, t in everything(optimizer).items()}


def newest(folder):
    return [None, *finished(folder).values()][-1]


def save(folder, step, optimizers):
    savers = [checkpoint.Saver(folder) for _ in optimizers]
    for number, (saver, optimizer) in enumerate(zip(savers, optimizers, strict=True)):
        saver.save(step, number, optimizer.state())
    return checkpoint.finish(folder, step, [saver.wait() for saver in savers], ABOUT)


def test_a_checkpoint_of_three_stages_is_loaded_by_two(tmp_path):
    written = job(3, steps=2)
    path = save(tmp_path, 2, written)
    assert path == tmp_path / "step-000002" == newest(tmp_path)
    read = job(2)
    for optimizer in read:
        optimizer.load(checkpoint.load(path, optimizer.state()))
    assert same(state(read), state(written))


def test_the_folder_is_an_ordinary_distributed_checkpoint_of_the_full_model(tmp_path):
    written = state(job(3, steps=1))
    path = save(tmp_path, 1, job(3, steps=1))
    read = {name: torch.zeros_like(tensor) for name, tensor in written.items()}
    dcp.load(read, checkpoint_id=path, no_dist=True)
    assert same(read, written)
    assert same(checkpoint.load(path), written)


def test_torchs_tool_converts_a_checkpoint_into_a_torch_save_file(tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    optimizers = job(2, steps=1)
    dcp_to_torch_save(save(tmp_path, 1, optimizers), tmp_path / "model.pt")
    assert same(torch.load(tmp_path / "model.pt", weights_only=True), state(optimizers))


def test_a_save_does_not_see_later_changes_of_the_state(tmp_path):
    settings = small(parallel__stages=1, numerics__reproducible=True)
    optimizer = StageOptimizer(settings, stage := Stage(settings, 0, CPU))
    optimizer.step(gradient(stage, 0), 0)
    expected = state([optimizer])
    saver = checkpoint.Saver(tmp_path)
    saver.save(1, 0, optimizer.state())
    optimizer.step(gradient(stage, 1), 1)  # during the write
    assert same(checkpoint.load(checkpoint.finish(tmp_path, 1, [saver.wait()], ABOUT)), expected)


def test_a_worker_can_finish_a_checkpoint_that_another_worker_finished_before_its_death(tmp_path):
    optimizers = job(2, steps=1)
    savers = [checkpoint.Saver(tmp_path) for _ in optimizers]
    for number, (saver, optimizer) in enumerate(zip(savers, optimizers, strict=True)):
        saver.save(1, number, optimizer.state())
    parts = [saver.wait() for saver in savers]
    assert checkpoint.finish(tmp_path, 1, parts, ABOUT) == checkpoint.finish(tmp_path, 1, parts, ABOUT)
    assert same(checkpoint.load(tmp_path / "step-000001"), state(optimizers))


def test_a_killed_save_leaves_the_previous_checkpoint_whole(tmp_path):
    optimizers = job(2, steps=1)
    path = save(tmp_path, 1, optimizers)
    child = os.fork()
    if not child:
        saver = checkpoint.Saver(tmp_path)
        while True:
            saver.save(2, 0, optimizers[0].state())
    place = checkpoint.temporary(tmp_path, 2)
    deadline = time.monotonic() + 60
    while not list(place.glob("stage-0-*")) and time.monotonic() < deadline:
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert list(place.glob("stage-0-*")) and newest(tmp_path) == path
    assert same(checkpoint.load(path), state(optimizers))
    assert save(tmp_path, 2, job(2, steps=2)) == newest(tmp_path), "leftovers do not prevent the next save"
    assert same(checkpoint.load(tmp_path / "step-000002"), state(job(2, steps=2)))


def test_a_checkpoint_gets_its_name_only_after_all_stages_have_saved(tmp_path):
    optimizers = job(2)
    saver = checkpoint.Saver(tmp_path)
    saver.save(7, 0, optimizers[0].state())
    with pytest.raises(OSError):
        checkpoint.finish(tmp_path, 7, [saver.wait(), "stage-1-missing"], ABOUT)
    assert newest(tmp_path) is None


def test_a_failed_write_is_reported_and_does_not_prevent_the_next_save(tmp_path):
    (optimizer,) = job(1)
    blocked = tmp_path / "file"
    blocked.touch()
    saver = checkpoint.Saver(blocked)
    future = saver.save(1, 0, optimizer.state())
    with pytest.raises(RuntimeError, match=r"part .*/stage-0-\w+ could not be written: .* Not a directory: .*$"):
        saver.wait()
    assert future.exception() is not None
    blocked.unlink()
    checkpoint.finish(blocked, 1, [saver.save(1, 0, optimizer.state()).result()], ABOUT)


def test_a_failed_write_leaves_nothing_that_takes_the_room_of_the_next_save(tmp_path, monkeypatch):
    def fails(_, storage_writer, **options):
        storage_writer.path.mkdir(parents=True)
        (storage_writer.path / "__0_0.distcp").write_bytes(bytes(100))
        raise OSError(errno.ENOSPC, "No space left on device")

    saver = checkpoint.Saver(tmp_path)
    with monkeypatch.context() as full:
        full.setattr(dcp, "save", fails)
        with pytest.raises(RuntimeError, match="No space left on device"):
            saver.save(1, 0, {"model.w": torch.zeros(10)}).result()
    assert not [*tmp_path.rglob("*.distcp")]
    checkpoint.finish(tmp_path, 1, [saver.save(1, 0, {"model.w": torch.zeros(10)}).result()], ABOUT)


def test_a_save_first_deletes_older_unfinished_checkpoints_that_are_not_in_use(tmp_path):
    """Otherwise the parts of abandoned checkpoints may fill the disk, so that no later checkpoint can be written."""
    for step in (10, 20, 40):
        (checkpoint.temporary(tmp_path, step) / "stage-0-0-0123abcd").mkdir(parents=True)
    saver = checkpoint.Saver(tmp_path)
    saver.save(30, 0, {"model.w": torch.zeros(10)}).result()
    assert set(unfinished(tmp_path).values()) == {10, 20, 30, 40}
    saver.save(30, 0, {"model.w": torch.zeros(10)}, in_use=[10]).result()
    assert set(unfinished(tmp_path).values()) == {10, 30, 40}


def test_the_saving_thread_creates_no_cuda_context(tmp_path, monkeypatch):
    """The default GPU of a new thread is number 0, where a context would cost another worker half a gigabyte."""

    def asked(*_):
        raise AssertionError("a CUDA context in the saving thread")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", asked)
    written = job(1)
    assert same(checkpoint.load(save(tmp_path, 1, written)), state(written))


@pytest.mark.parametrize("left", ["about.json", ".metadata", "stage-0/__0_0.distcp", "stage-0-abcd/.metadata", "core"])
def test_leftovers_of_a_killed_save_never_enter_the_next_checkpoint(left, tmp_path):
    """A regression: a leftover about.json was listed among the files and then replaced, which counted as damage."""
    remains = checkpoint.temporary(tmp_path, 1) / left
    remains.parent.mkdir(parents=True)
    remains.write_text('{"step": 1}')
    written = job(2, steps=1)
    path = save(tmp_path, 1, written)
    assert damage(path, 1) is None and same(checkpoint.load(path), state(written))
    files = json.loads((path / "about.json").read_text())["files"]
    assert {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()} == {*files, "about.json"}


MOMENTS = ("_check_whole", "write_synced", "check_files", "fingerprint", "sync", "rename", "_delete_all_but")


@pytest.mark.parametrize("moment", MOMENTS)
def test_another_worker_finishes_a_checkpoint_whose_assembler_was_killed(moment, tmp_path, monkeypatch):
    """The assembler is killed before each step of `finish`, at its first and at its second call."""
    for count in (1, 2):
        folder = tmp_path / str(count)
        optimizers = job(2, steps=1)
        savers = [checkpoint.Saver(folder) for _ in optimizers]
        parts = [s.save(1, n, o.state()).result() for n, (s, o) in enumerate(zip(savers, optimizers, strict=True))]
        child = os.fork()
        if not child:
            called, function = [], getattr(checkpoint, moment)

            def dies(*arguments, called=called, function=function, count=count):
                called.append(1)
                if len(called) == count:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments)

            monkeypatch.setattr(checkpoint, moment, dies)
            checkpoint.finish(folder, 1, parts, ABOUT)
            os._exit(0)
        os.waitpid(child, 0)
        if newest(folder) is None:
            checkpoint.finish(folder, 1, parts, ABOUT)
        path = newest(folder)
        assert damage(path, 1) is None and same(checkpoint.load(path), state(optimizers))


def test_a_truncated_file_is_found_before_the_checkpoint_gets_its_name(tmp_path):
    (optimizer,) = job(1, steps=1)
    saver = checkpoint.Saver(tmp_path)
    part = saver.save(1, 0, optimizer.state()).result()
    (data,) = (checkpoint.temporary(tmp_path, 1) / part).glob("*.distcp")
    os.truncate(data, 100)
    with pytest.raises(ValueError, match="has 100 bytes, but its table of contents requires"):
        checkpoint.finish(tmp_path, 1, [part], ABOUT)
    assert newest(tmp_path) is None


def test_a_table_of_contents_that_lacks_a_chunk_is_rejected(tmp_path):
    path = save(tmp_path, 1, job(1, steps=1))
    for change in ("chunk", "storage", "negative"):
        table = read_table(path)
        name = next(name for name, held in table.state_dict_metadata.items() if len(held.size) == 2)
        held = table.state_dict_metadata[name]
        if change == "chunk":
            held.chunks = []
        elif change == "storage":
            table.storage_data = {i: info for i, info in table.storage_data.items() if i.fqn != name}
        else:
            held.size = torch.Size([-4, *held.size[1:]])
        changed = tmp_path / change
        shutil.copytree(path, changed)
        (changed / ".metadata").write_bytes(pickle.dumps(table))
        with pytest.raises(ValueError, match=f"lacks a part of {name}"):
            checkpoint.load(changed)


def damaged_about(files):
    return json.dumps({"step": 1, "files": files})


@pytest.mark.parametrize(
    "about",
    [
        damaged_about({}),
        damaged_about([]),
        damaged_about({".metadata": 3}),
        json.dumps({"step": 2, "files": {".metadata": [1, 1]}}),
        "[" * 100_000,
        "",
        "null",
    ],
    ids=["no files", "a list", "no fingerprint", "another step", "nested", "empty", "null"],
)
def test_a_checkpoint_with_an_invalid_about_json_counts_as_damaged(about, tmp_path):
    path = save(tmp_path, 1, job(1, steps=1))
    assert damage(path, 1) is None
    (path / "about.json").write_text(about)
    assert damage(path, 1) is not None


def test_a_single_flipped_bit_is_found(tmp_path):
    path = save(tmp_path, 1, job(1, steps=1))
    (part,) = path.rglob("*.distcp")
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    assert "has a wrong checksum" in damage(path, 1)


@pytest.mark.timeout(60)
def test_a_pipe_instead_of_a_file_does_not_block_a_reader(tmp_path):
    path = save(tmp_path, 1, job(1, steps=1))
    (data,) = path.rglob("*.distcp")
    data.unlink()
    os.mkfifo(data)
    assert "is not a regular file" in damage(path, 1)
    (path / "about.json").unlink()
    os.mkfifo(path / "about.json")
    assert "is not a regular file" in damage(path, 1)


def test_a_second_checkpoint_of_a_step_replaces_the_first(tmp_path):
    save(tmp_path, 3, job(1, steps=1))
    again = job(2, steps=2)
    assert same(checkpoint.load(save(tmp_path, 3, again)), state(again))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]


def test_only_the_newest_checkpoints_are_kept_and_leftovers_of_older_saves_are_deleted(tmp_path):
    optimizers = job(1)
    for step in (9, 10, 999_999, 1_000_000):
        save(tmp_path, step, optimizers)
    for step in (10, 2_000_000):
        checkpoint.temporary(tmp_path, step).mkdir()
    checkpoint.prune(tmp_path, 1_000_000, 2)
    assert [path.name for path in finished(tmp_path).values()] == ["step-999999", "step-1000000"]
    assert not checkpoint.temporary(tmp_path, 10).exists() and checkpoint.temporary(tmp_path, 2_000_000).exists()


def test_after_a_restart_a_damaged_checkpoint_is_set_aside_and_does_not_count(tmp_path):
    """Otherwise it would be kept instead of the newest one of the restarted job."""
    optimizers = job(1, steps=1)
    for step in (20, 40):
        save(tmp_path, step, optimizers)
    for times in (1, 2):
        (tmp_path / "step-000040/.metadata").write_bytes(b"damaged")
        assert newest_of(tmp_path, Survey()).step == 20 and 40 in finished(tmp_path), "only the coordinator renames it"
        assert newest_whole(tmp_path).step == 20
        assert (tmp_path / "step-000040.damaged").exists() and not (tmp_path / "step-000040").exists()
        assert (tmp_path / "step-000040.damaged-2").exists() == (times == 2)
        save(tmp_path, 40, optimizers)
    checkpoint.temporary(tmp_path, 35).mkdir()
    save(tmp_path, 33, optimizers)
    checkpoint.prune(tmp_path, 33, 1)
    assert [path.name for path in finished(tmp_path).values()] == ["step-000033", "step-000040"]
    assert checkpoint.temporary(tmp_path, 35).exists(), "it may be a later checkpoint of this job, such as its last one"


def test_a_checkpoint_that_is_finished_while_the_older_one_is_read_is_found(tmp_path, monkeypatch):
    """With checkpoint.keep=1, its assembler deletes the older one before that is read."""
    saver = checkpoint.Saver(tmp_path)
    parts = {step: saver.save(step, 0, {"model.w": torch.zeros(10)}).result() for step in (20, 40)}
    checkpoint.finish(tmp_path, 20, [parts[20]], ABOUT)
    fingerprint = checksum.fingerprint

    def reads(path):
        monkeypatch.setattr(checksum, "fingerprint", fingerprint)
        checkpoint.finish(tmp_path, 40, [parts[40]], ABOUT)
        checkpoint.prune(tmp_path, 40, keep=1)
        return fingerprint(path)

    monkeypatch.setattr(checksum, "fingerprint", reads)
    assert newest_whole(tmp_path) == (40, {})


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_checkpoint_whose_disk_fails_is_skipped_and_keeps_its_name(number, tmp_path, monkeypatch):
    for step in (20, 40):
        save(tmp_path, step, job(1, steps=1))
    fingerprint = checksum.fingerprint

    def reads(path):
        if tmp_path / "step-000040" in path.parents:
            raise OSError(number, os.strerror(number))
        return fingerprint(path)

    with monkeypatch.context() as failing:
        failing.setattr(checksum, "fingerprint", reads)
        whole = newest_whole(tmp_path)
    assert whole.step == 20 and os.strerror(number) in whole.damaged[40]
    assert newest_whole(tmp_path) == (40, {})


def test_a_damaged_checkpoint_that_cannot_be_renamed_is_skipped(tmp_path, monkeypatch):
    for step in (20, 40):
        save(tmp_path, step, job(1, steps=1))
    (tmp_path / "step-000040/.metadata").write_bytes(b"damaged")

    def rename(path, target):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "rename", rename)
    whole = newest_whole(tmp_path)
    assert whole.step == 20 and whole.damaged[40].endswith("; it could not be renamed: Read-only file system")


def test_foreign_names_beside_the_checkpoints_are_never_read_moved_or_deleted(tmp_path):
    optimizers = job(1, steps=1)
    for step in (1, 2):
        save(tmp_path, step, optimizers)
    foreign = [
        "step-backup",
        "step-000001.bak",
        "step-000002.bak.tmp",
        "step-1",
        "step-",
        "step-000001.tmp.old",
        "best",
    ]
    for name in foreign:
        shutil.copytree(tmp_path / "step-000001", tmp_path / name)
    (tmp_path / "step-000003").write_text("a file")
    (tmp_path / "step-000001.tmp").symlink_to(tmp_path / "best")
    before = {name: sorted(p.name for p in (tmp_path / name).rglob("*")) for name in foreign}
    save(tmp_path, 4, optimizers)
    checkpoint.prune(tmp_path, 4, 1)
    assert (tmp_path / "step-000003").is_file() and (tmp_path / "step-000001.tmp").is_symlink()
    assert {name: sorted(p.name for p in (tmp_path / name).rglob("*")) for name in foreign} == before
    assert [path.name for path in finished(tmp_path).values()] == ["step-000004"]
    assert newest_whole(tmp_path).step == 4 and not newest_whole(tmp_path).damaged


def test_a_resume_with_other_settings_is_rejected_and_names_the_key(tmp_path):
    path = save(tmp_path, 5, job(1))
    assert checkpoint.read_about(path)["step"] == 5
    checkpoint.refuse_mismatch(path, ABOUT)
    other = small(parallel__pipelines=2, parallel__microbatches=2)
    checkpoint.refuse_mismatch(path, checkpoint.describe(other, "text"))  # the same number of micro-batches per step
    for changes, key, saved, now in [
        ({"model__width": 48}, "model.width", 24, 48),
        ({"parallel__microbatches": 5}, r"parallel.pipelines \* parallel.microbatches", 4, 5),
        ({"numerics__reproducible": True}, "numerics.reproducible", False, True),
    ]:
        says = f"cannot resume from .*: {key} is {saved} in the checkpoint and {now} in this run$"
        with pytest.raises(ValueError, match=says):
            checkpoint.refuse_mismatch(path, checkpoint.describe(small(**changes), "text"))
    with pytest.raises(ValueError, match=r"data\.path"):
        checkpoint.refuse_mismatch(path, checkpoint.describe(small(), "another text"))


def test_a_missing_tensor_is_named(tmp_path):
    path = save(tmp_path, 1, job(1))
    with pytest.raises(ValueError, match=r"does not contain model\.layers\.9"):
        checkpoint.load(path, ["model.layers.9"])


def test_metadata_with_foreign_names_is_not_unpickled(tmp_path):
    class Foreign:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    path = save(tmp_path, 1, job(1))
    (path / ".metadata").write_bytes(pickle.dumps(Foreign()))
    with pytest.raises(ValueError, match="mkdir, which is not allowed there"):
        checkpoint.load(path)
    assert not (tmp_path / "made").exists()


class AsInPython311(pickle.Pickler):
    """Pickles members of an Enum as attributes of their class, like Python 3.11.0 to 3.11.3."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


class AsInPython313(pickle._Pickler):
    """Pickles paths under the module name of Python 3.13."""

    def save_global(self, value, name=None):
        if value is not PosixPath:
            return super().save_global(value, name)
        self.write(b"cpathlib._local\nPosixPath\n")
        self.memoize(value)

    dispatch = pickle._Pickler.dispatch | {type: save_global}


@pytest.mark.parametrize(("pickler", "trace"), [(AsInPython311, b"getattr"), (AsInPython313, b"pathlib._local")])
def test_a_checkpoint_of_another_python_version_is_loaded(pickler, trace, tmp_path):
    written = job(1)
    metadata = save(tmp_path, 1, written) / ".metadata"
    table, out = pickle.loads(metadata.read_bytes()), BytesIO()
    table.storage_meta = PosixPath("somewhere")
    pickler(out).dump(table)
    assert trace in out.getvalue()
    metadata.write_bytes(out.getvalue())
    assert same(checkpoint.load(metadata.parent), state(written))


def test_metadata_cannot_reach_attributes_through_an_enum(tmp_path):
    class Attribute:
        def __reduce__(self):
            return getattr, (TensorProperties, "__init__")

    path = save(tmp_path, 1, job(1))
    (path / ".metadata").write_bytes(pickle.dumps(Attribute()))
    with pytest.raises(ValueError, match=r"names __init__ of .*, which is not an enum member"):
        checkpoint.load(path)


@pytest.mark.parametrize("name", ["os.getcwd", "pickle.loads", "Metadata.__init__", "os", "field", "dataclass"])
def test_metadata_cannot_reach_other_modules_through_torch(name, tmp_path):
    """Unpicklers resolve dotted names as attributes, and a module's attributes include the modules that it imports."""
    path = save(tmp_path, 1, job(1))
    (path / ".metadata").write_bytes(f"ctorch.distributed.checkpoint.metadata\n{name}\n(tR.".encode())
    with pytest.raises(ValueError, match=rf"is not a readable checkpoint: .*{name}, which is not allowed there"):
        checkpoint.load(path)


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x80\x05N.", pickle.dumps({"a": 1}), b"(" * 100_000])
def test_invalid_metadata_is_rejected_in_one_sentence(content, tmp_path):
    path = save(tmp_path, 1, job(1))
    (path / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match="is not a readable checkpoint"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    "content", ["", "[]", '{"step": []}', '{"step": 2, "files": 3}', '{"step": 2, "run.seed": {"a": [1]}}']
)
def test_a_damaged_about_json_is_reported_in_one_sentence(tmp_path, content):
    (tmp_path / "about.json").write_text(content)
    with pytest.raises(ValueError, match=r"about\.json cannot be read: "):
        checkpoint.refuse_mismatch(tmp_path, {"run.seed": 1})
