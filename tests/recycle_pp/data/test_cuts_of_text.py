"""A text file is cut only at places that the pre-tokenizers of byte-level tokenizers never join."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from recycle_pp.data import tokenizer
from recycle_pp.data.documents import Corpus, Position, text
from recycle_pp.data.tokenization import Recipe
from tests.recycle_pp.data import formats

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "GPT-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "Llama 3": pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
    "Qwen": pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"),
    "GPT-4o": pre_tokenizers.Split(Regex(GPT4O), "isolated"),
}
WHITE = "".join(map(chr, [9, 11, 12, 13, 32, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F,
                          0x205F, 0x3000]))  # fmt: skip


def words(split: str, of: str) -> list[str]:
    return [word for word, _ in SPLITS[split].pre_tokenize_str(of)]


@pytest.mark.parametrize("split", SPLITS)
@given(st.text(alphabet=f"\n\n\n\n  \r\n\u3000{WHITE}abAB1/.'é中\u0301", max_size=40))
@settings(max_examples=300)
def test_no_word_crosses_a_place_where_a_file_may_be_cut(split, content):
    for place in (text.LINE, text.WORD):
        for found in place.finditer(content.encode()):
            before, behind = content.encode()[: found.end()].decode(), content.encode()[found.end() :].decode()
            assert words(split, before) + words(split, behind) == words(split, content)


@pytest.mark.parametrize("white", WHITE)
def test_a_file_is_never_cut_at_a_line_break_next_to_white_space(white):
    for beside in (f"a{white}\nabc", f"a\n{white}abc", f"a\n\nabc{white}"):
        assert not text.LINE.search(beside.encode())
    assert text.LINE.search(b"a\nabc").end() == 2


def test_a_file_with_windows_line_breaks_is_cut_between_words(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "SIZE", 200)
    content = "the lazy dog jumps\r\n" * 100
    (tmp_path / "a.txt").write_bytes(content.encode())
    parts = [piece.text for piece, _ in Corpus.of([str(tmp_path / "a.txt")]).pieces(Position(0, 0))]
    assert "".join(parts) == content and max(map(len, parts)) <= 200
    assert all(part.startswith(" ") for part in parts[1:])


def test_cutting_a_file_changes_its_name_in_the_cache(tmp_path, monkeypatch):
    bpe = tokenizer.load(str(formats.tokenizer(tmp_path / "tokenizer")))
    (tmp_path / "a.txt").write_text("some words " * 30)
    recipe = Recipe(Corpus.of([str(tmp_path / "a.txt"), formats.jsonl(tmp_path / "b.jsonl", ["x" * 400])]), bpe)
    whole = recipe.digest
    monkeypatch.setattr(text, "SIZE", 200)
    assert recipe.digest != whole
    lines = Recipe(Corpus.of([str(tmp_path / "b.jsonl")]), bpe)
    assert lines.corpus.cuts == (), "a line is never cut, so its tokens are those of earlier versions"
