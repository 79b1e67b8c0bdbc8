"""Tokenisation gives the same file after any number of interruptions."""

import json
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recycle_pp.data import tokenization, tokenizer
from recycle_pp.data.documents import Corpus, Position, jsonl, parquet, text
from recycle_pp.data.token_file import describe, sidecar
from recycle_pp.data.tokenization import Recipe, tokenise, verify
from tests.recycle_pp.data import formats


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    return tokenizer.load(str(formats.tokenizer(tmp_path_factory.mktemp("tokenizer") / "t")))


@pytest.fixture
def recipe(tmp_path, bpe, monkeypatch):
    """A recipe with files of three formats, in batches of a few documents."""
    monkeypatch.setattr(tokenization, "TOGETHER", 700)
    monkeypatch.setattr(text, "SIZE", 300)
    documents = [formats.text(30, seed) for seed in range(30)]
    (tmp_path / "a.txt").write_text(formats.text(400))
    paths = [
        str(tmp_path / "a.txt"),
        formats.jsonl(tmp_path / "b.jsonl", documents),
        formats.parquet(tmp_path / "c.parquet", [*documents, None, "", "last"]),
    ]
    return Recipe(Corpus.of(paths), bpe)


class Interruption(BaseException):
    pass


def interrupted_after(batches):
    left = iter(range(batches))

    def report(_):
        if next(left, None) is None:
            raise Interruption

    return report


def test_a_separator_follows_each_document(tmp_path, recipe, bpe):
    out = tmp_path / "out.bin"
    description = tokenise(recipe, out)
    documents = [formats.text(30, seed) for seed in range(30)]
    whole = [formats.text(400), *documents, *documents, "", "last"]
    expected = np.concatenate([np.append(ids, 0) for ids in bpe.encode(whole)])
    assert np.array_equal(np.fromfile(out, "<u2"), expected)
    assert (description.tokens, description.documents, description.vocabulary) == (len(expected), 63, 320)
    assert verify(out) == describe(out) == description
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.bin", "out.bin.json"]


@given(st.lists(st.integers(0, 12), max_size=5), st.booleans())
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_interrupted_tokenisation_continues_and_gives_the_same_bytes(tmp_path_factory, recipe, stops, torn):
    folder = tmp_path_factory.mktemp("out")
    whole = tokenise(recipe, folder / "whole.bin")
    out, most = folder / "out.bin", 0
    for stop in stops:
        try:
            tokenise(recipe, out, interrupted_after(stop))
        except Interruption:
            sure = json.loads(Path(f"{out}.partial.json").read_text())["tokens"]
            assert sure >= most, "recorded progress is never lost"
            most = sure
            if torn:  # like SIGKILL between two records: more is written than recorded
                with open(f"{out}.partial", "ab") as file:
                    file.write(b"torn!")
    assert tokenise(recipe, out) == whole
    assert out.read_bytes() == (folder / "whole.bin").read_bytes()


def test_a_resume_keeps_the_progress(tmp_path, recipe):
    with pytest.raises(Interruption):
        tokenise(recipe, tmp_path / "out.bin", interrupted_after(8))
    reports = []
    tokenise(recipe, tmp_path / "out.bin", reports.append)
    assert reports[0].begun > 0.2 * reports[0].total
    assert reports[-1].done == reports[-1].total
    assert [r.done for r in reports] == sorted(r.done for r in reports)


@pytest.mark.parametrize("damage", ["a byte", "missing bytes", "no JSON", "another text"])
def test_a_damaged_partial_file_is_started_again(tmp_path, recipe, damage):
    out, partial = tmp_path / "out.bin", tmp_path / "out.bin.partial"
    with pytest.raises(Interruption):
        tokenise(recipe, out, interrupted_after(8))
    content = partial.read_bytes()
    if damage == "a byte":
        partial.write_bytes(b"\xff" + content[1:])
    elif damage == "missing bytes":
        partial.write_bytes(content[:-2])
    elif damage == "no JSON":
        (tmp_path / "out.bin.partial.json").write_text("{")
    else:
        os.utime(recipe.corpus.files[0], ns=(0, 0))
    reports = []
    description = tokenise(recipe, out, reports.append)
    assert reports[0].begun == 0
    assert verify(out) == description
    assert (tmp_path / "out.bin").read_bytes().startswith(content)


def test_a_finished_file_is_reused_and_other_files_are_never_overwritten(tmp_path, recipe, bpe):
    out = tmp_path / "out.bin"
    description = tokenise(recipe, out)
    assert tokenise(recipe, out, lambda _: pytest.fail("the file exists already")) == description
    os.utime(recipe.corpus.files[0], ns=(0, 0))
    with pytest.raises(ValueError, match=r"out\.bin was made from a different text or tokenizer; remove it"):
        tokenise(recipe, out)
    sidecar(out).unlink()
    with pytest.raises(ValueError, match=r"out\.bin exists and was not made by this command; name another file"):
        tokenise(recipe, out)


def test_a_damaged_file_is_detected(tmp_path, recipe):
    out = tmp_path / "out.bin"
    tokenise(recipe, out)
    content = bytearray(out.read_bytes())
    content[100] ^= 1
    out.write_bytes(content)
    with pytest.raises(ValueError, match="has a wrong checksum"):
        verify(out)


def test_two_processes_make_the_same_file_only_once(tmp_path, recipe):
    fork = multiprocessing.get_context("fork")
    made = fork.Value("i", 0)

    def work():
        tokenise(recipe, tmp_path / "out.bin", lambda report: _count(made, report))

    processes = [fork.Process(target=work) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert made.value == 1
    assert verify(tmp_path / "out.bin")
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.bin", "out.bin.json"]


def _count(made, report):
    if report.done == report.total:
        made.value += 1


def pieces(format, file, offset=0, column="text"):
    return list(format.pieces(file, column, offset))


@pytest.mark.parametrize("size", [64, 300, 10**6])
def test_a_text_file_read_in_pieces_gives_the_tokens_of_the_whole(tmp_path, monkeypatch, bpe, size):
    monkeypatch.setattr(text, "SIZE", size)
    content = formats.text(2000)
    (tmp_path / "a.txt").write_text(content)
    parts = pieces(text, tmp_path / "a.txt")
    assert "".join(part.text for part in parts) == content
    assert [part.ends for part in parts] == [False] * (len(parts) - 1) + [True]
    assert len(parts) > 1 or size == 10**6
    assert np.array_equal(np.concatenate(bpe.encode([p.text for p in parts])), bpe.encode([content])[0])


@given(st.text(alphabet="aé€😀 \n", max_size=300))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_text_without_line_breaks_is_cut_between_characters(tmp_path_factory, content):
    file = tmp_path_factory.mktemp("text") / "a.txt"
    file.write_bytes(content.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "SIZE", 10)
        patch.setattr(text, "LONGEST", 20)
        parts = pieces(text, file)
        assert "".join(part.text for part in parts) == content
        for i, part in enumerate(parts):
            assert [p.text for p in pieces(text, file, part.next)] == [p.text for p in parts[i + 1 :]]


def test_every_format_can_continue_from_any_piece(tmp_path):
    documents = [formats.text(5, seed) for seed in range(25)]
    files = {
        jsonl: formats.jsonl(tmp_path / "a.jsonl", documents),
        parquet: formats.parquet(tmp_path / "a.parquet", documents),
    }
    for format, file in files.items():
        all_of_them = pieces(format, Path(file))
        assert [piece.text for piece in all_of_them] == documents
        for i, piece in enumerate(all_of_them):
            assert pieces(format, Path(file), piece.next) == all_of_them[i + 1 :]


@pytest.mark.parametrize(
    "content, sentence",
    [
        ('{"text": "a"}\n{"text": 3}\n', "byte 14: this line has no text in 'text'; it has text"),
        ('{"text": "a"}\n\n[1]\n', "byte 15: this line has no text in 'text'; it has no object"),
        ('{"body": "a"}\n', "byte 0: this line has no text in 'text'; it has body. data.column names the column"),
        ("text\n", "byte 0: this line is not JSON"),
        ("[" * 100_000 + "\n", "byte 0: this line is not JSON"),
    ],
)
def test_a_line_that_is_not_a_document_is_named(tmp_path, content, sentence):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ValueError) as error:
        pieces(jsonl, tmp_path / "a.jsonl")
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_an_invalid_parquet_file_or_a_missing_column_is_named(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(ValueError, match=r"a\.parquet is not a Parquet file: "):
        pieces(parquet, tmp_path / "a.parquet")
    file = Path(formats.parquet(tmp_path / "b.parquet", ["x"]))
    with pytest.raises(ValueError, match=r"has no text in 'body'; its columns are id \(int64\), text \(string\)"):
        pieces(parquet, file, column="body")
    file = Path(formats.parquet(tmp_path / "c.parquet", [formats.text(100)]))
    content = bytearray(file.read_bytes())
    content[60:600] = b"\xff" * 540
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"c\.parquet, row 0: "):
        pieces(parquet, file)


@pytest.mark.parametrize(
    "value, kind",
    [
        (["a"], "list<element: string>"),
        ([{"role": "a"}], "list<element: struct<role: string>>"),
        ({"role": "a"}, "struct<role: string>"),
        (1, "int64"),
    ],
)
def test_a_parquet_column_without_text_is_named_with_its_type(tmp_path, value, kind):
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": [value]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=rf"has no text in 'text'; its columns are text \({kind}\)"):
        pieces(parquet, tmp_path / "a.parquet")


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_every_type_of_text_in_parquet_is_read(tmp_path, kind):
    import pyarrow.parquet

    column = pyarrow.array(["a", "b"])
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(getattr(pyarrow, kind)())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    assert [piece.text for piece in pieces(parquet, tmp_path / "a.parquet")] == ["a", "b"]


def test_only_the_documents_in_a_folder_are_read(tmp_path):
    formats.jsonl(tmp_path / "b.jsonl", ["x"])
    formats.parquet(tmp_path / "a.parquet", ["y"])
    (tmp_path / "README.md").write_text("not of the corpus")
    corpus = Corpus.of([str(tmp_path)])
    assert [file.name for file in corpus.files] == ["a.parquet", "b.jsonl"]
    assert [piece.text for piece, _ in corpus.pieces(Position(0, 0))] == ["y", "x"]


def test_compressed_empty_and_missing_files_are_rejected(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(b"x")
    (tmp_path / "empty").touch()
    for name, sentence in [
        ("a.jsonl.gz", "is compressed; decompress it first"),
        ("empty", "contains no text"),
        ("b", "does not exist"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            Corpus.of([str(tmp_path / name)])


def test_the_separator_comes_from_the_tokenizer_or_the_user(tmp_path):
    folder = formats.tokenizer(tmp_path / "t")
    assert tokenizer.load(str(folder)).separator == 0
    assert tokenizer.load(str(folder), "!").separator == tokenizer.load(str(folder)).encode(["!"])[0][0]
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "#"}}))
    assert tokenizer.load(str(folder)).separator == tokenizer.load(str(folder)).encode(["#"])[0][0]
    with pytest.raises(ValueError, match=r"^data\.separator: .* has no token 'nothing'"):
        tokenizer.load(str(folder), "nothing")
    changed = (folder / "tokenizer.json").read_text().replace(formats.END, "<unusual>")
    (tmp_path / "bare.json").write_text(changed)
    with pytest.raises(ValueError, match=r"^data\.separator must name the token after every document"):
        tokenizer.load(str(tmp_path / "bare.json"))
    (tmp_path / "none.json").write_text("{}")
    for place, sentence in [
        ("none.json", "is not a tokenizer"),
        ("nowhere", "must be bytes, a tokenizer.json or a folder"),
    ]:
        with pytest.raises(ValueError, match=rf"^data\.tokenizer.*{sentence}") as error:
            tokenizer.load(str(tmp_path / place))
        assert "\n" not in str(error.value)
