"""Makes a file of samples from files of conversations. For use with `tokenization.tokenise`, see `chat`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from recycle_pp.data.documents import Corpus, Position, format_of, text
from recycle_pp.data.source import Packed
from recycle_pp.data.tokenization import Made
from recycle_pp.data.tokenizer import definition

from .conversation import conversation_of
from .packing import TOKEN, mark, rows_of, targets_in
from .template import ChatTemplate

TOGETHER = 4096  # conversations that are packed together
VERSION = 2  # version of this method; after a change, existing files are not used any more


@dataclass(frozen=True)
class ChatRecipe:
    """A `tokenization.Preparation` that packs conversations into samples.

    corpus     .jsonl, .parquet and saved datasets
    tokenizer  a folder with a tokenizer.json and a chat template
    sequence   tokens of a sample
    """

    corpus: Corpus
    tokenizer: str
    sequence: int

    def __post_init__(self) -> None:
        for file in self.corpus.files:
            if format_of(file) is text:
                raise ValueError(f"{file} has no conversations: data.format=chat reads .jsonl, .parquet and datasets")

    @cached_property
    def digest(self) -> str:
        """Digest of the tokenizer's files, and of the corpus files' names, sizes and modification times."""
        folder = definition(self.tokenizer).parent
        tokenizer = [
            (path.name, hashlib.sha256(path.read_bytes()).hexdigest())
            for path in sorted(folder.iterdir())
            if path.suffix in (".json", ".jinja") and ("token" in path.name or "template" in path.name)
        ]
        words = (VERSION, "chat", TOGETHER, tokenizer, self.corpus.column, self.corpus.identity, self.sequence)
        return hashlib.sha256(repr(words).encode()).hexdigest()[:32]

    @property
    def dtype(self) -> str:
        return "uint32"

    @property
    def vocabulary(self) -> int:
        return self._template.vocabulary

    @property
    def separator(self) -> int:
        return 0  # conversations have marks instead

    def parts(self, start: Position) -> Iterator[Made]:
        records, behind = [], start
        columns = [self._column, "prompt", "completion", "tools"]
        for record, place, behind in self.corpus.records(columns, start):
            records.append((record, place))
            if len(records) == TOGETHER:
                yield self._part(records, behind)
                records = []
        if records:
            yield self._part(records, behind)

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer)

    @property
    def _column(self) -> str:
        return "messages" if self.corpus.column == "text" else self.corpus.column

    def _part(self, records: list[tuple[Any, str]], behind: Position) -> Made:
        T, kept, cut, cut_tokens = self.sequence, [], 0, 0
        for record, place in records:
            marked = self._marked(record, place)
            if len(marked) > T:
                cut, cut_tokens = cut + 1, cut_tokens + len(marked) - T
            if targets_in(marked[:T]):
                kept.append(marked[:T])
        rows = rows_of(kept, T)
        packed = Packed(T, len(rows), len(kept), targets_in(rows), cut, cut_tokens, len(records) - len(kept))
        return Made(rows.reshape(-1), len(kept), behind, int((rows & TOKEN).max(initial=0)), packed)

    def _marked(self, record: Any, place: str) -> np.ndarray:
        try:
            if not isinstance(record, dict):
                raise ValueError("this is not an object with messages")
            ids, counted = self._template.encode(conversation_of(record, self._column))
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        return mark(ids, counted)
