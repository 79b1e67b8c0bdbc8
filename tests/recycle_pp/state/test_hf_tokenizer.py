"""The tokenizer of an export is the one that made the training data."""

import json
import os

import pytest

from recycle_pp.data.tokenizer import end_of_text
from recycle_pp.state.hf_tokenizer import write_tokenizer
from tests.recycle_pp.data import formats


@pytest.fixture
def origin(tmp_path):
    return formats.tokenizer(tmp_path / "origin")


def written(tmp_path, data, model, origin=None):
    """Whether the export has the byte tokenizer, another one, or none."""
    (out := tmp_path / "out").mkdir()
    found = write_tokenizer({"data": {"tokenizer": None, **data}, "model": {"vocabulary": 512, **model}}, origin, out)
    assert found == bool(os.listdir(out))
    if not found:
        return "none"
    own = (origin or out.parent) / "tokenizer.json"
    same = own.is_file() and (out / "tokenizer.json").read_bytes() == own.read_bytes()
    return "that of the folder" if same else "bytes"


@pytest.mark.parametrize("kind, init", [("hf", "random"), ("llama", "random"), ("custom", "weights")])
@pytest.mark.parametrize("named", [True, False])
def test_a_model_trained_on_bytes_gets_no_tokenizer_of_its_folder(tmp_path, origin, kind, init, named):
    (tmp_path / "text").write_text("some text")
    path = str(tmp_path / "text") if named else None
    assert written(tmp_path, {"path": path}, {"kind": kind, "init": init}, origin) == "bytes"


def test_a_folder_without_a_tokenizer_is_trained_on_bytes(tmp_path):
    (empty := tmp_path / "empty").mkdir()
    assert written(tmp_path, {"path": None}, {"kind": "hf", "init": "weights"}, empty) == "bytes"


def test_pretrained_models_and_files_of_tokens_get_the_tokenizer_of_the_folder(tmp_path, origin):
    prefix = formats.megatron(tmp_path / "corpus", [[5] * 40])
    for number, (data, init) in enumerate([({"path": prefix}, "random"), ({"path": "a.bin"}, "random"),
                                           ({"build": "a:b"}, "random"), ({"path": None}, "weights")]):  # fmt: skip
        (place := tmp_path / str(number)).mkdir()
        assert written(place, data, {"kind": "hf", "init": init}, origin) == "that of the folder"


def test_absent_files_are_not_taken_for_text_unless_the_vocabulary_is_that_of_bytes(tmp_path):
    (first := tmp_path / "first").mkdir(), (second := tmp_path / "second").mkdir()
    assert written(first, {"path": "/nowhere/corpus_text_document"}, {"kind": "transformer"}) == "none"
    assert written(second, {"path": "/nowhere/book.txt"}, {"kind": "transformer", "vocabulary": 256}) == "bytes"


def test_the_separator_of_a_unigram_tokenizer_has_its_place_in_the_vocabulary_as_id(tmp_path):
    definition = tmp_path / "tokenizer.json"
    definition.write_text(json.dumps({"model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["</s>", -9.87]]}}))
    assert end_of_text(definition, "</s>") == ("</s>", 1)
