"""Saved datasets and datasets of the Hugging Face hub give the same tokens as a file of the same documents."""

import json
from importlib.util import find_spec

import numpy as np
import pytest

from recycle_pp.data import hub, sources
from recycle_pp.data.documents import Corpus, Position
from tests.recycle_pp.data import formats
from tests.recycle_pp.in_process import small

pytestmark = pytest.mark.skipif(find_spec("datasets") is None, reason="datasets is not installed")
TEXTS = [formats.text(5, seed) for seed in range(40)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def dataset(columns):
    from datasets import Dataset

    return Dataset.from_dict(columns)


def tokens(path, column="text"):
    settings = small(data__path=str(path), data__tokenizer="bytes", data__column=column)
    (source,) = sources.training(settings)
    return np.asarray(source.slice(0, len(source)))


def test_a_saved_dataset_gives_the_tokens_of_the_same_lines(tmp_path):
    saved = dataset({"id": list(range(40)), "text": TEXTS})
    saved.save_to_disk(tmp_path / "saved", num_shards=3)
    assert np.array_equal(tokens(tmp_path / "saved"), tokens(formats.jsonl(tmp_path / "a.jsonl", TEXTS)))
    saved.select(range(39, 9, -1)).save_to_disk(tmp_path / "some")
    assert np.array_equal(tokens(tmp_path / "some"), tokens(formats.jsonl(tmp_path / "b.jsonl", TEXTS[:9:-1])))


def test_reading_starts_at_any_row(tmp_path):
    dataset({"text": [*TEXTS, None, "last"]}).save_to_disk(tmp_path / "saved")
    corpus = Corpus.of([str(tmp_path / "saved")])
    pieces = [(piece.text, behind) for piece, behind in corpus.pieces(Position(0, 0))]
    assert [text for text, _ in pieces] == [*TEXTS, "last"]
    for text, behind in pieces[:-1:7]:
        rest = [piece.text for piece, _ in corpus.pieces(behind)]
        assert rest == [*TEXTS, "last"][TEXTS.index(text) + 1 :]
    assert corpus.done(pieces[-1][1]) == sum(corpus.sizes)


def test_a_dataset_of_the_hub_is_fetched_once(tmp_path, monkeypatch):
    """A local folder stands for the hub."""
    (tmp_path / "name").mkdir()
    formats.jsonl(tmp_path / "name" / "train.jsonl", TEXTS)
    found = tokens(f"hf://{tmp_path / 'name'}:train[:10]")
    assert np.array_equal(found, tokens(formats.jsonl(tmp_path / "a.jsonl", TEXTS[:10])))
    monkeypatch.setattr(hub, "_fetch", lambda *_: pytest.fail("it is fetched already"))
    assert np.array_equal(found, tokens(f"hf://{tmp_path / 'name'}:train[:10]"))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda at: f"hf://{at}/nothing", "hf://.*nothing cannot be fetched: "),
        (lambda at: splits(at), "contains the splits train, test; name one, such as .*train"),
        (lambda at: saved(at, {"text": [["a", "b"]]}), "has no text in 'text'; its columns are text"),
        (lambda at: saved(at, {"text": [[{"role": "a"}]]}), "has no text in 'text'; its columns are text"),
        (lambda at: saved(at, {"text": [{"role": "a"}]}), "has no text in 'text'; its columns are text"),
        (
            lambda at: saved(at, {"body": TEXTS}),
            "has no text in 'text'; its columns are body. data.column names the column",
        ),
    ],
)
def test_a_dataset_without_text_is_refused_in_one_sentence(tmp_path, make, sentence):
    with pytest.raises(ValueError, match=f"^data.path: .*{sentence}"):
        tokens(make(tmp_path))


def splits(at):
    from datasets import DatasetDict

    one = dataset({"text": TEXTS})
    DatasetDict({"train": one, "test": one}).save_to_disk(at / "both")
    return at / "both"


def saved(at, columns):
    dataset(columns).save_to_disk(at / "other")
    return at / "other"


def test_conversations_may_be_rows_of_a_dataset(tmp_path):
    from recycle_pp.data.chat.recipe import ChatRecipe
    from recycle_pp.data.tokenization import tokenise
    from tests.recycle_pp.data.chat import chats

    records = [{"messages": chats.conversation(seed)} for seed in range(20)]
    dataset({"messages": [record["messages"] for record in records]}).save_to_disk(tmp_path / "saved")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    folder = str(chats.tokenizer(tmp_path / "tokenizer"))
    for name in ("saved", "a.jsonl"):
        tokenise(ChatRecipe(Corpus.of([str(tmp_path / name)]), folder, 384), tmp_path / f"{name}.bin")
    assert (tmp_path / "saved.bin").read_bytes() == (tmp_path / "a.jsonl.bin").read_bytes()
