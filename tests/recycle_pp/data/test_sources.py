"""Tokens of every format behind one interface, and the errors about inconsistent files."""

import itertools
import json
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from recycle_pp.config.settings import Data, Model, Settings
from recycle_pp.data import megatron, sources, token_file
from recycle_pp.data.file_tokens import FileTokens
from recycle_pp.data.samples import Samples
from tests.recycle_pp.data import formats


def opened(path: object, vocabulary: int = 60000, **data: object) -> list[np.ndarray]:
    settings = Settings(data=Data(path=path, **data), model=Model(vocabulary=vocabulary))  # type: ignore[arg-type]
    return [np.asarray(source.slice(0, len(source))) for source in sources.training(settings)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


DOCUMENTS = [[5, 6, 7], [8], list(range(100, 900)), []]


@pytest.mark.parametrize("code, dtype", [(8, "<u2"), (4, "<i4"), (5, "<i8"), (1, "<u1")])
def test_megatrons_documents_are_concatenated(tmp_path, code, dtype):
    documents = [[token % 200 for token in document] for document in DOCUMENTS]
    prefix = formats.megatron(tmp_path / "corpus", documents, code, dtype)
    for path in (prefix, prefix + ".bin", prefix + ".idx"):
        (tokens,) = opened(path)
        assert tokens.tolist() == list(itertools.chain(*documents))
    assert isinstance(megatron.read(prefix).tokens, FileTokens)


@pytest.mark.parametrize(
    "offset, content, sentence",
    [
        (0, b"NOTANIDX!", "is not a Megatron index"),
        (9, struct.pack("<Q", 2), "has version 2, but only version 1 is supported"),
        (17, b"\x07", "specifies token type 7, which is not an integer type"),
        (18, struct.pack("<Q", 10**15), "1000000000000000 sequences and 5 boundaries need"),
        (34, struct.pack("<i", -3), "are not contiguous"),
        (34, struct.pack("<i", 4), "are not contiguous"),
        (34 + 16 + 8, struct.pack("<q", -8), "are not contiguous"),
        (34 + 12, struct.pack("<i", 10**9), "contains 804 tokens, but .* requires 1000000804"),
    ],
)
def test_an_inconsistent_index_is_rejected_in_one_sentence(tmp_path, offset, content, sentence):
    prefix = formats.megatron(tmp_path / "corpus", DOCUMENTS)
    index = Path(prefix + ".idx")
    before = index.read_bytes()
    index.write_bytes(before[:offset] + content + before[offset + len(content) :])
    with pytest.raises(ValueError, match=rf"^data\.path: {prefix}.*{sentence}") as error:
        opened(prefix)
    assert "\n" not in str(error.value)


@given(st.binary(max_size=120), st.booleans())
def test_a_random_index_is_rejected_or_read_without_a_crash(tmp_path_factory, content, magic):
    prefix = str(tmp_path_factory.mktemp("hostile") / "x")
    Path(prefix + ".idx").write_bytes(megatron.MAGIC * magic + content)
    Path(prefix + ".bin").write_bytes(b"\x01\x00" * 20)
    with suppress(ValueError):
        assert len(megatron.read(prefix)) <= 40


def test_the_type_of_a_bin_comes_from_its_description_the_vocabulary_or_the_user(tmp_path):
    tokens, path = np.array([1, 70000, 3, 4]), str(tmp_path / "x.bin")
    tokens.astype("<u4").tofile(path)
    assert opened(path, 100_000)[0].tolist() == tokens.tolist()
    assert opened(path, 60_000, dtype="uint32")[0].tolist() == tokens.tolist()
    assert len(opened(path, 60_000)[0]) == len(opened(path, 100_000, dtype="uint16")[0]) == 8
    crc = token_file.checksum(path)
    token_file.write_description(path, token_file.Description("uint32", 4, 1, 80_000, 0, crc, ""))
    assert opened(path, 80_000)[0].tolist() == tokens.tolist()
    with pytest.raises(
        ValueError, match=r"made by a tokenizer with 80000 tokens; model\.vocabulary must be at least 80000"
    ):
        opened(path, 79_999)
    with pytest.raises(ValueError, match=r"contains uint32 according to x\.bin\.json, not uint16"):
        opened(path, 80_000, dtype="uint16")
    Path(path).write_bytes(b"\0" * 12)
    with pytest.raises(ValueError, match=r"has 12 bytes, but x\.bin\.json requires 16"):
        opened(path, 80_000)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{",
        json.dumps({"dtype": "uint16"}),
        json.dumps(dict.fromkeys(token_file.Description.__dataclass_fields__, "x")),
    ],
)
def test_an_invalid_description_is_rejected_in_one_sentence(tmp_path, content):
    path = tmp_path / "x.bin"
    path.write_bytes(b"\0" * 12)
    token_file.sidecar(path).write_text(content)
    with pytest.raises(ValueError, match=r"x\.bin\.json does not describe a token file .*; remove it") as error:
        opened(str(path))
    assert "\n" not in str(error.value)


def test_a_bin_with_half_a_token_is_rejected(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"\0" * 13)
    with pytest.raises(ValueError, match="has 13 bytes, which is not a whole number of uint16 tokens"):
        opened(str(tmp_path / "x.bin"))


def test_text_of_any_format_is_tokenised_once_with_a_separator_after_every_document(tmp_path, monkeypatch):
    folder = formats.tokenizer(tmp_path / "tokenizer")
    documents = [formats.text(20, seed) for seed in range(20)]
    expected = opened(formats.jsonl(tmp_path / "a.jsonl", documents), tokenizer=str(folder))[0]
    assert (expected == 0).sum() == 20 and expected[-1] == 0  # formats.END has the id 0
    other = formats.parquet(tmp_path / "a.parquet", documents, "body")
    for tokenizer in (folder, folder / "tokenizer.json"):
        assert np.array_equal(opened(other, tokenizer=str(tokenizer), column="body")[0], expected)
    (tmp_path / "texts").mkdir()
    for i, document in enumerate(documents):
        (tmp_path / "texts" / f"{i:02}.txt").write_bytes(document.encode())
    assert np.array_equal(opened(str(tmp_path / "texts"), tokenizer=str(folder))[0], expected)
    monkeypatch.setattr(sources, "tokenise", lambda *_: None)  # nothing may be tokenised again
    assert np.array_equal(opened(str(tmp_path / "texts"), tokenizer=str(folder))[0], expected)
    as_bytes = tmp_path / "bytes.jsonl"
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    formats.jsonl(as_bytes, ["ab", "c"])
    assert opened(str(as_bytes), tokenizer="bytes")[0].tolist() == [97, 98, 0, 99, 0]


def test_a_tokenizer_with_more_tokens_than_the_model_is_rejected_before_tokenisation(tmp_path):
    folder = formats.tokenizer(tmp_path / "tokenizer")
    path = formats.jsonl(tmp_path / "a.jsonl", ["x"])
    with pytest.raises(ValueError, match=r"has 320 tokens; model\.vocabulary must be at least 320, but it is 256"):
        opened(path, 256, tokenizer=str(folder))
    assert not sources.cache_folder("tokens").exists()


def test_tokens_that_were_added_to_the_tokenizer_must_fit_into_the_model_only_if_they_occur(tmp_path):
    folder = formats.tokenizer(tmp_path / "tokenizer")
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_special_tokens(["<pad>"])
    made.save(str(folder / "tokenizer.json"))
    without, within = (formats.jsonl(tmp_path / f"{text}.jsonl", [f"fox {text}"] * 20) for text in ("fox", "<pad>"))
    assert max(opened(without, 320, tokenizer=str(folder))[0]) < 320
    assert max(opened(within, 321, tokenizer=str(folder))[0]) == 320
    for _ in range(2):
        with pytest.raises(ValueError, match=r"model\.vocabulary must be at least 321, but it is 320"):
            opened(within, 320, tokenizer=str(folder))


def samples(**data: object) -> Samples:
    return Samples(Settings(data=Data(**data), model=Model(sequence=8)))  # type: ignore[arg-type]


def test_windows_of_several_sources_are_numbered_consecutively_and_the_end_of_each_is_held_out(tmp_path):
    (tmp_path / "a").write_bytes(b"a" * 900 + b"A" * 100)
    (tmp_path / "b").write_bytes(b"b" * 450 + b"B" * 50)
    both = samples(path=[str(tmp_path / "a"), str(tmp_path / "b")], validation_share=0.1)
    assert (both.windows, both.held_outs) == (899 // 8 + 449 // 8, 99 // 8 + 49 // 8)
    letters = [bytes(both.train(window)).decode() for window in range(both.windows)]
    assert letters == ["a" * 9] * 112 + ["b" * 9] * 56
    held_out = [bytes(both.held_out(number)).decode() for number in range(18)]
    assert all(held_out[at : at + 3].count("A" * 9) == 2 and "B" * 9 in held_out[at : at + 3] for at in range(0, 18, 3))
    assert sorted(both.ids(0, both.windows)) == list(range(both.windows))
    weighted = samples(path=[str(tmp_path / "a"), str(tmp_path / "b")], weights=[1.0, 3.0], validation_share=0.1)
    drawn = "".join(chr(weighted.train(window)[0]) for window in weighted.ids(0, 400))
    assert (drawn.count("a"), drawn.count("b")) == (100, 300)
    assert weighted.fingerprint != both.fingerprint
    assert [chr(weighted.held_out(number)[0]) for number in range(8)].count("B") == 6


def test_with_separate_validation_files_all_training_files_are_trained_on(tmp_path):
    (tmp_path / "a").write_bytes(b"a" * 801)
    (tmp_path / "v").write_bytes(b"v" * 81)
    own = samples(path=str(tmp_path / "a"), validation_path=str(tmp_path / "v"))
    assert (own.windows, own.held_outs) == (100, 10)
    assert bytes(own.held_out(9)) == b"v" * 9
    with pytest.raises(ValueError, match=r"^data\.validation_path: .*none does not exist"):
        samples(path=str(tmp_path / "a"), validation_path=str(tmp_path / "none"))


def test_a_negative_token_is_rejected(tmp_path):
    prefix = formats.megatron(tmp_path / "corpus", [[1, -2] * 100], 4, "<i4")
    with pytest.raises(ValueError, match="contains token -2, but tokens must be at least 0"):
        samples(path=prefix).train(0)


def samples_of(path: object, **data: object) -> Samples:
    of = Data(path=path, document_mask=True, validation_share=0.0, **data)  # type: ignore[arg-type]
    return Samples(Settings(data=of, model=Model(vocabulary=60000, sequence=8)))


def test_the_end_of_documents_comes_from_the_token_file_or_the_tokenizer(tmp_path):
    texts = [formats.text(20), formats.text(30, seed=1)]
    tokenizer = str(formats.tokenizer(tmp_path / "tokenizer"))
    assert samples_of(formats.jsonl(tmp_path / "a.jsonl", texts), tokenizer="bytes").separator == 0
    made = samples_of(formats.jsonl(tmp_path / "b.jsonl", texts), tokenizer=tokenizer).separator
    prefix = formats.megatron(tmp_path / "corpus", [[5] * 40])
    assert made == samples_of(prefix, tokenizer=tokenizer).separator is not None


def test_documents_without_a_separator_are_rejected(tmp_path):
    prefix = formats.megatron(tmp_path / "corpus", [[5] * 40])
    for path in (prefix, None):
        with pytest.raises(
            ValueError, match=r"^data.document_mask must be false: the token that separates documents of"
        ):
            samples_of(path)
    text = formats.jsonl(tmp_path / "a.jsonl", [formats.text(20)])
    samples_of(text, tokenizer="bytes")
    (cached,) = (tmp_path / "cache" / "recycle_pp" / "tokens").glob("*.bin")
    tokenizer = str(formats.tokenizer(tmp_path / "tokenizer"))
    with pytest.raises(ValueError, match=r"separated by token 0 in .* and by token"):
        samples_of([str(cached), prefix], tokenizer=tokenizer, separator="d")
