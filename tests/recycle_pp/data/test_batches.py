"""The samples of a step, and the errors about unusable data."""

import hashlib
import itertools

import numpy as np
import pytest
import torch

from recycle_pp.data import raw_text, token_file
from recycle_pp.data.batch import Batch
from recycle_pp.data.batches import Batches
from recycle_pp.data.documents import Corpus
from recycle_pp.data.file_tokens import FileTokens
from tests.recycle_pp.in_process import CPU, small


@pytest.fixture
def text(tmp_path):
    """A file whose byte pairs are all different."""
    path = tmp_path / "text"
    path.write_bytes(bytes(i % 251 for i in range(2000)))
    return str(path)


def tensors(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return batch.inputs, batch.labels


def batches(path: str | None, **changes: object) -> Batches:
    return Batches(small(data__path=path, **changes))


def test_the_order_of_the_samples_never_changes_between_versions(text):
    data = batches(text)
    assert (data.windows, data.validations, data.fingerprint) == (118, 3, "176d9e90845d2104")
    assert [data.sample_ids(*at) for at in ((0, 0), (0, 3), (7, 1), (100, 2))] == [
        [81, 1],
        [105, 96],
        [27, 19],
        [78, 57],
    ]
    digest = hashlib.sha256()
    for step, g in itertools.product(range(5), range(4)):
        for tensor in tensors(data.batch(step, g)):
            digest.update(tensor.numpy().tobytes())
    assert digest.hexdigest()[:16] == "6521076ed4b54862"
    assert data.validation(1).inputs[0].tolist() == list(range(175, 191))


def test_an_epoch_has_every_sample_once(text):
    data = batches(text, parallel__microbatch_size=3)
    G, seen = 4, []
    for step in range(40):
        for g in range(G):
            seen += data.sample_ids(step, g)
    for epoch in range(3):
        assert sorted(seen[epoch * data.windows : (epoch + 1) * data.windows]) == list(range(data.windows))


@pytest.mark.parametrize("pipelines, microbatches", [(1, 12), (3, 4), (4, 3)])
def test_the_samples_do_not_depend_on_the_number_of_pipelines(text, pipelines, microbatches):
    expected = batches(text, parallel__pipelines=2, parallel__microbatches=6)
    data = batches(text, parallel__pipelines=pipelines, parallel__microbatches=microbatches)
    for step, g in [(0, 0), (3, 11), (50, 7)]:
        assert data.sample_ids(step, g) == expected.sample_ids(step, g)
        assert all(map(torch.equal, tensors(data.batch(step, g)), tensors(expected.batch(step, g))))


def test_targets_are_the_inputs_shifted_by_one_token_and_ids_are_window_numbers(text):
    data = batches(text)
    inputs, targets = tensors(data.batch(5, 1))
    assert inputs.shape == targets.shape == (2, 16) and inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    starts = torch.tensor(data.sample_ids(5, 1)) * 16 % 251
    assert torch.equal(inputs[:, 0], starts)
    assert torch.equal(targets[:, -1], (starts + 16) % 251)


def test_the_held_out_part_is_never_trained_on(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"a" * 1800 + b"b" * 200)
    data = batches(str(path), data__validation_share=0.1)
    inputs, targets = tensors(data.validation(0))
    assert bool((inputs == ord("b")).all() and (targets == ord("b")).all())
    trained = torch.cat([data.batch(0, g).labels for g in range(2 * data.windows)])
    assert bool((trained == ord("a")).all())
    assert all(map(torch.equal, tensors(data.validation(0)), tensors(data.validation(data.validations))))


def test_the_default_data_is_the_source_code_of_pythons_library():
    data, again = batches(None), batches(None)
    assert data.name == "Python's standard library" and data.fingerprint == again.fingerprint
    assert data.windows * 16 > 5_000_000
    inputs = data.batch(0, 0).inputs
    assert bool((inputs < 256).all())


def test_a_folder_is_read_in_an_order_that_does_not_depend_on_the_file_system(tmp_path):
    for name in ("b/z.txt", "a.txt", "b/y.txt", "c.txt", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name[0].encode() * 400)
    assert raw_text.read(str(tmp_path)).tokens.tobytes() == b"a" * 400 + b"c" * 400 + b"b" * 800


@pytest.mark.parametrize("name", ["test", "tests", "site-packages", "dist-packages"])
def test_folders_of_any_name_in_a_users_corpus_are_read(tmp_path, name):
    for folder in (name, "__pycache__", ".git"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_bytes(b"x" * 5)
    assert raw_text.read(str(tmp_path)).tokens.tobytes() == b"x" * 5
    assert Corpus.of([str(tmp_path)]).files == (tmp_path / name / "a.txt",)
    assert not any(name in file.parts for file in raw_text.files(tmp_path, skipped=raw_text.SKIPPED))


def test_nanogpts_bin_is_uint16_and_is_not_read_into_memory(tmp_path):
    path = tmp_path / "train.bin"
    (np.arange(4000) % 300).astype(np.uint16).tofile(path)
    data = batches(str(path), model__vocabulary=300)
    assert isinstance(token_file.read(str(path), "auto", 300).tokens, FileTokens)
    (window, _), inputs = data.sample_ids(2, 1), data.batch(2, 1).inputs
    assert inputs[0].tolist() == [(window * 16 + i) % 300 for i in range(16)]


def test_different_texts_have_different_fingerprints(tmp_path):
    def fingerprint(content):
        path = tmp_path / "text"
        path.write_bytes(content)
        return batches(str(path)).fingerprint

    assert fingerprint(b"a" * 999 + b"b") != fingerprint(b"a" * 1000) != fingerprint(b"a" * 1001)
    large = np.zeros((1 << 24) + 5, dtype=np.uint8)
    before = fingerprint(large.tobytes())
    large[-1] = 1
    assert fingerprint(large.tobytes()) != before


def test_unusable_data_is_rejected_in_one_sentence_that_names_the_key(tmp_path):
    empty, short, folder, binary = (tmp_path / name for name in ("empty", "short", "folder", "empty.bin"))
    empty.touch(), binary.touch(), folder.mkdir(), short.write_bytes(b"too short")
    for path, problem in [
        (tmp_path / "missing", "does not exist"),
        (empty, "contains no text"),
        (folder, "contains no text"),
        (binary, "is empty"),
        (short, "has 9 tokens, too few"),
    ]:
        with pytest.raises(ValueError, match=rf"^data\.path: {path} {problem}") as error:
            batches(str(path))
        assert "\n" not in str(error.value)


def test_a_token_outside_the_vocabulary_is_rejected(text, tmp_path):
    with pytest.raises(ValueError, match=r"contains token 250; model\.vocabulary must be at least 251, but it is 100"):
        batches(text, model__vocabulary=100)
    path = tmp_path / "train.bin"
    np.full(2000, 777, dtype=np.uint16).tofile(path)
    with pytest.raises(ValueError, match=r"token 777; model\.vocabulary must be at least 778"):
        batches(str(path)).batch(0, 0)


def test_the_error_about_validation_without_held_out_samples_names_the_settings(text):
    data = batches(text, data__validation_share=0.0)
    assert data.validations == 0
    with pytest.raises(ValueError, match=r"raise it or set run\.validate_every=0"):
        data.validation(0)


class Stub:
    """A host tensor that records how it is copied."""

    device = CPU

    def __init__(self, pinned=False):
        self.pinned = pinned

    def pin_memory(self):
        return Stub(pinned=True)

    def to(self, device, non_blocking=False):
        return device.type, self.pinned, non_blocking


def test_a_copy_to_a_gpu_does_not_wait_for_the_work_of_the_gpu():
    there = Batch(Stub(), Stub(), more={"mask": Stub()}).to(torch.device("cuda"))
    assert there.inputs == there.labels == there.more["mask"] == ("cuda", True, True)
    assert Batch(Stub(), Stub()).to(CPU).inputs == ("cpu", False, False)
