"""A damaged or incomplete folder of weights is reported in one sentence."""

import json

import pytest
import torch
from safetensors.torch import save_file

from recycle_pp.model.safetensors_folder import Folder

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345\n"


@pytest.mark.parametrize(
    "change, sentence",
    [
        (
            lambda file: file.write_bytes(POINTER),
            r"two\.safetensors is not a complete safetensors file \(.+\); download",
        ),
        (lambda file: file.write_bytes(file.read_bytes()[:-4]), r"two\.safetensors is not a complete safetensors file"),
        (lambda file: file.write_bytes(b""), r"two\.safetensors is not a complete safetensors file"),
        (lambda file: file.unlink(), r"two\.safetensors is missing; download it again"),
        (
            lambda file: save_file({"other": torch.ones(2)}, file),
            r"two\.safetensors is not a complete safetensors file",
        ),
    ],
    ids=["pointer", "truncated", "empty", "missing", "another"],
)
def test_an_incomplete_file_is_reported_in_one_sentence(tmp_path, change, sentence):
    save_file({"a": torch.ones(4)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(4)}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(Folder(tmp_path).read("b"), torch.ones(4))
    change(tmp_path / "two.safetensors")
    with pytest.raises(ValueError, match=rf"model\.path: {tmp_path}/{sentence}") as caught:
        Folder(tmp_path).read("b")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [POINTER, b""], ids=["pointer", "empty"])
def test_an_incomplete_single_file_is_reported_in_one_sentence(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.path: .*model\.safetensors is not a complete safetensors file"):
        Folder(tmp_path)


def test_an_invalid_index_is_reported_in_one_sentence(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_bytes(POINTER)
    with pytest.raises(ValueError, match=r"model\.path: .*index\.json is not an index of safetensors; download it"):
        Folder(tmp_path)
