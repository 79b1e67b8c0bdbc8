"""Files of conversations are converted to samples once, and all labels of a step have the same weight."""

import json

import pytest
import torch

from recycle_pp.data import sources
from recycle_pp.data.batch import IGNORED
from recycle_pp.data.batches import Batches
from recycle_pp.data.chat import recipe as recipes
from recycle_pp.data.chat.recipe import ChatRecipe
from recycle_pp.data.documents import Corpus
from recycle_pp.data.samples import Samples
from recycle_pp.data.token_file import describe, read
from recycle_pp.data.tokenization import tokenise
from tests.recycle_pp.data.chat import chats
from tests.recycle_pp.data.test_tokenization import Interruption, interrupted_after
from tests.recycle_pp.in_process import small

T = 384


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    return chats.tokenizer(tmp_path / "tokenizer")


def settings(path, folder, **changes):
    defaults = {"data__path": path, "data__format": "chat", "data__tokenizer": str(folder), "model__sequence": T}
    return small(**{**defaults, "model__vocabulary": chats.VOCABULARY, **changes})


def test_a_file_of_each_kind_gives_the_same_samples(tmp_path, folder):
    import pyarrow
    import pyarrow.parquet

    records = [{"messages": chats.conversation(seed), "more": seed} for seed in range(50)]
    files = [chats.jsonl(tmp_path / "a.jsonl", records), str(tmp_path / "b.parquet")]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), files[1], row_group_size=7)
    renamed = [{"chat": record["messages"]} for record in records]
    files.append(chats.jsonl(tmp_path / "c.jsonl", renamed))
    made = [
        tokenise(ChatRecipe(Corpus.of([file], column), str(folder), T), tmp_path / f"{n}.bin")
        for n, (file, column) in enumerate(zip(files, ("text", "messages", "chat"), strict=True))
    ]
    assert (tmp_path / "0.bin").read_bytes() == (tmp_path / "1.bin").read_bytes() == (tmp_path / "2.bin").read_bytes()
    assert made[0].packed == made[1].packed and made[0].packed.conversations == 50
    assert describe(tmp_path / "0.bin") == made[0] and made[0].tokens == T * made[0].packed.samples


def test_fields_that_a_table_adds_to_messages_and_tools_are_not_rendered(tmp_path):
    import datasets
    import pyarrow
    import pyarrow.parquet

    folder = chats.tokenizer(tmp_path / "tools", chats.TOOLS)
    records = [
        {
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "tool_calls": [{"name": name, "arguments": {key: 1}}]},
                {"role": "tool", "content": "1"},
                {"role": "assistant", "content": "one"},
            ],
            "tools": [{"name": name, "parameters": {key: {"type": kind}}}],
        }
        for name, key, kind in (("add", "a", "number"), ("open", "b", "string"))
    ]
    files = [chats.jsonl(tmp_path / "a.jsonl", records), str(tmp_path / "b.parquet"), str(tmp_path / "c")]
    table = pyarrow.Table.from_pylist(records)
    assert table["tools"][0].as_py()[0]["parameters"]["b"] is None
    pyarrow.parquet.write_table(table, files[1])
    datasets.Dataset(table).save_to_disk(files[2])
    for number, file in enumerate(files):
        tokenise(ChatRecipe(Corpus.of([file], "messages"), str(folder), T), tmp_path / f"{number}.bin")
    assert (tmp_path / "0.bin").read_bytes() == (tmp_path / "1.bin").read_bytes() == (tmp_path / "2.bin").read_bytes()


def test_an_interrupted_preparation_continues_and_gives_the_same_bytes(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(recipes, "TOGETHER", 8)
    paths = [chats.many(tmp_path / f"{name}.jsonl", 30) for name in "ab"]
    recipe = ChatRecipe(Corpus.of(paths), str(folder), T)
    whole = tokenise(recipe, tmp_path / "whole.bin")
    with pytest.raises(Interruption):
        tokenise(recipe, tmp_path / "out.bin", interrupted_after(4))
    reports = []
    assert tokenise(recipe, tmp_path / "out.bin", reports.append) == whole
    assert 0 < reports[0].begun < reports[0].total
    assert (tmp_path / "out.bin").read_bytes() == (tmp_path / "whole.bin").read_bytes()


def test_long_conversations_are_cut_and_conversations_without_an_answer_are_left_out(tmp_path, folder):
    long, short = chats.conversation(0, turns=30), chats.conversation(1)
    silent, question = [short[0]], [{"role": "user", "content": "x" * T}, short[1]]
    path = chats.jsonl(tmp_path / "a.jsonl", [{"messages": m} for m in (long, short, silent, question)])
    found = Samples(settings(path, folder, data__validation_share=0.0)).packed[path]
    assert (found.conversations, found.left_out, found.cut) == (2, 2, 2)
    said = "2 conversations in 2 samples of 384 tokens, of which"
    assert found.sentence.startswith(said) and "2 conversations were longer and lost" in found.sentence


def test_labels_are_the_answers_and_documents_are_the_conversations(tmp_path, folder):
    data = Batches(settings(chats.many(tmp_path / "a.jsonl"), folder, data__validation_share=0.2))
    assert data.validations >= 1
    for batch in [*(data.batch(0, g) for g in range(4)), data.validation(0)]:
        assert batch.inputs.shape == batch.labels.shape == (2, T) and batch.inputs.dtype == torch.int64
        assert batch.items is None
        for inputs, labels, ids, places in zip(batch.inputs, batch.labels, *batch.more.values(), strict=True):
            begins = [t for t in range(T) if t == 0 or ids[t] != ids[t - 1]]
            assert begins == [t for t in range(T) if places[t] == 0]
            assert all(inputs[t] in (chats.START, 0) for t in begins)
            counted = [t for t in range(T) if labels[t] != IGNORED]
            assert counted and all(labels[t] == inputs[t + 1] and ids[t] == ids[t + 1] for t in counted)
            ends = sum(inputs[t + 1] == chats.END for t in counted)
            assert 2 * ends == (inputs == chats.END).sum(), "every second end token belongs to an answer"


def test_labels_are_counted_over_the_whole_step(tmp_path, folder):
    data = Batches(settings(chats.many(tmp_path / "a.jsonl"), folder, data__validation_share=0.3))
    for step in (0, 3):
        labels = torch.cat([data.batch(step, g).labels for g in range(4)])
        assert data.items(step) == int((labels != IGNORED).sum()) / 4
    labels = torch.cat([data.validation(i).labels for i in range(3)])
    assert data.validations >= 3 and data.validation_items(3) == int((labels != IGNORED).sum()) / 3
    assert Batches(small()).items(0) is Batches(small()).validation_items(2) is None


def test_every_sample_is_either_trained_on_or_held_out(tmp_path, folder):
    path = chats.many(tmp_path / "a.jsonl", 200)
    samples = Samples(settings(path, folder, data__validation_share=0.1))
    whole = samples.packed[path].samples
    assert samples.windows + samples.held_outs == whole and samples.held_outs == -(-whole // 10)
    rows = [samples.train(i).tobytes() for i in range(samples.windows)]
    assert not {samples.held_out(i).tobytes() for i in range(samples.held_outs)} & set(rows)


def test_a_prepared_file_may_be_used_as_data(tmp_path, folder):
    path = chats.many(tmp_path / "a.jsonl")
    tokenise(ChatRecipe(Corpus.of([path]), str(folder), T), tmp_path / "a.bin")
    text, made = (Batches(settings(str(place), folder)) for place in (path, tmp_path / "a.bin"))
    assert text.fingerprint == made.fingerprint and torch.equal(text.batch(1, 2).inputs, made.batch(1, 2).inputs)
    for changes, sentence in [
        ({"model__sequence": 32}, "contains samples of 384 tokens; model.sequence must be 384, but it is 32"),
        ({"data__format": "text"}, "contains conversations, which need data.format=chat"),
        ({"model__vocabulary": 257}, "model.vocabulary must be at least 258, but it is 257"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            Batches(settings(str(tmp_path / "a.bin"), folder, **changes))


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("[]", "byte 0: this is not an object with messages"),
        ('{"text": "a"}', "byte 0: this record has neither 'messages' nor both 'prompt' and 'completion'; it has text"),
        (
            '{"messages": [{"role": "user", "content": "a"}]}',
            "none of the 1 conversations contains any text from the assistant",
        ),
    ],
)
def test_a_file_without_conversations_is_refused_with_the_place(tmp_path, folder, line, sentence):
    (tmp_path / "a.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=f"^data.path: .*{sentence}"):
        Batches(settings(str(tmp_path / "a.jsonl"), folder))


def test_a_text_file_is_refused_as_conversations(tmp_path, folder):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError, match=r"a\.txt has no conversations: data\.format=chat reads \.jsonl, "):
        Batches(settings(str(tmp_path / "a.txt"), folder))


def test_a_different_template_or_length_makes_a_different_file(tmp_path, folder):
    path = chats.many(tmp_path / "a.jsonl")
    digests = [sources._recipe(settings(path, folder, model__sequence=length), path).digest for length in (T, 32)]
    (folder / "chat_template.jinja").write_text(chats.MARKED)
    assert sources._recipe(settings(path, folder), path).digest not in digests and digests[0] != digests[1]


def test_half_a_surrogate_pair_is_replaced_by_a_question_mark(tmp_path, folder):
    record = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\ud800b"}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    tokenise(ChatRecipe(Corpus.of([str(tmp_path / "a.jsonl")]), str(folder), T), tmp_path / "a.bin")
    source = read(str(tmp_path / "a.bin"), "auto", chats.VOCABULARY, T)
    assert b"?b" in bytes(int(token) & 255 for token in source.slice(0, T))
