"""Tokenises text once into a file. An interruption loses only a few seconds of work.

    recipe = Recipe(Corpus.of(["corpus.parquet"]), load("models/smollm"))
    description = tokenise(recipe, Path("train.bin"), report=print)     # blocks; after an interruption, call it again
    description = verify(Path("train.bin"))                             # compares the checksum

Until the file is complete, its tokens are in `train.bin.partial`. Every few seconds `train.bin.partial.json` records
the number of tokens that have reached the disk, and the position in the text. A resumed file is identical to one made
without interruption. The partial file is renamed to `train.bin` after its description and all its bytes have reached
the disk.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from .documents import Corpus, Position
from .source import Packed
from .token_file import DTYPES, Description, checksum, describe, sidecar, write_description
from .tokenizer import Tokenizer

TOGETHER = 1 << 19  # characters in one call of the tokenizer, which delays a Ctrl-C by a fraction of a second
SURE_SECONDS = 5.0  # seconds between two updates of the record
VERSION = 1  # version of this method; after a change, existing files are no longer used


@dataclass(frozen=True)
class Made:
    """A part of the file.

    tokens     (n,) in the dtype of the recipe
    documents  number of documents that end in this part
    behind     the position in the text after this part
    largest    the largest token id
    packed     see `Description`
    """

    tokens: np.ndarray
    documents: int
    behind: Position
    largest: int
    packed: Packed | None = None


class Preparation(Protocol):
    """The inputs that determine every token of a file: a `Recipe`, or a `chat.recipe.ChatRecipe`.

    corpus      the text
    digest      digest of everything that affects a token
    dtype       uint16 or uint32
    vocabulary  the largest id + 1 of the separator and of the tokens that were not added to the vocabulary later
    separator   see `Description`
    """

    @property
    def corpus(self) -> Corpus: ...
    @property
    def digest(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def separator(self) -> int: ...

    def parts(self, start: Position) -> Iterator[Made]:
        """The parts of the file from `start` on, which is the start of the text or `behind` of an earlier part."""
        ...


@dataclass(frozen=True)
class Recipe:
    """Makes a file of documents with a separator after each."""

    corpus: Corpus
    tokenizer: Tokenizer

    @property
    def digest(self) -> str:
        """Digest of the tokenizer, and of the files' names, sizes and modification times. Does not read the files."""
        corpus = self.corpus
        words = (VERSION, self.tokenizer.digest, corpus.column, corpus.identity, *corpus.cuts)
        return hashlib.sha256(repr(words).encode()).hexdigest()[:32]

    @property
    def dtype(self) -> str:
        return "uint32" if self.tokenizer.vocabulary > 1 << 16 else "uint16"

    @property
    def vocabulary(self) -> int:
        return max(self.tokenizer.base, self.separator + 1)

    @property
    def separator(self) -> int:
        return self.tokenizer.separator

    def parts(self, start: Position) -> Iterator[Made]:
        for texts, ends, behind in self._batches(start):
            tokens = self._tokens(texts, ends)
            yield Made(tokens, sum(ends), behind, int(tokens.max(initial=0)))

    def _batches(self, start: Position) -> Iterator[tuple[list[str], list[bool], Position]]:
        texts: list[str] = []
        ends: list[bool] = []
        behind, size = start, 0
        for piece, behind in self.corpus.pieces(start):
            texts.append(piece.text)
            ends.append(piece.ends)
            size += len(piece.text) + 64  # + 64, because tiny documents cost time by number, not by length
            if size >= TOGETHER:
                yield texts, ends, behind
                texts, ends, size = [], [], 0
        if texts:
            yield texts, ends, behind

    def _tokens(self, texts: list[str], ends: list[bool]) -> np.ndarray:
        dtype, parts = DTYPES[self.dtype], []
        separator = np.array([self.separator], dtype)
        for ids, end in zip(self.tokenizer.encode(texts), ends, strict=True):
            parts += [ids.astype(dtype), separator] if end else [ids.astype(dtype)]
        return np.concatenate(parts)


@dataclass(frozen=True)
class Progress:
    """The record of a partial file, for the part that has reached the disk."""

    recipe: str
    file: int = 0  # with `offset`, the `Position` in the text
    offset: int = 0
    tokens: int = 0
    documents: int = 0
    crc32: int = 0
    largest: int = 0
    packed: Packed | None = None


@dataclass(frozen=True)
class Report:
    """The progress of a call of `tokenise`.

    done    bytes of text that are finished
    total   bytes of the whole text
    begun   bytes of text that were finished before the call
    tokens  tokens in the file so far
    """

    done: int
    total: int
    begun: int
    tokens: int


def tokenise(recipe: Preparation, out: Path, report: Callable[[Report], None] = lambda report: None) -> Description:
    """Makes `out` and its description, unless they exist for the same recipe. Blocks until both exist.

    After a KeyboardInterrupt or any other exception, another call continues the work. If another process is already
    making the same file, waits for it.

    Raises:
        ValueError: `out` was made by a different recipe or program, or the text cannot be read.
        OSError: `out` cannot be written.
    """
    digest = recipe.digest
    if (found := _finished(out, digest)) is not None:
        return found
    partial = Path(f"{out}.partial")
    out.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(partial) as file:
        if (found := _finished(out, digest)) is not None:  # another process made it while this one waited
            partial.unlink()
            return found
        progress = _continue(file, partial, digest, recipe)
        progress = _Writer(recipe, file, partial, progress).run(report)
        if progress.packed is not None and not progress.tokens:
            raise ValueError(
                f"none of the {progress.packed.left_out} conversations contains any text from the assistant"
            )
        description = Description(
            recipe.dtype, progress.tokens, progress.documents, max(recipe.vocabulary, progress.largest + 1),
            recipe.separator, progress.crc32, digest, progress.packed,
        )  # fmt: skip
        write_description(out, description)
        partial.rename(out)
        _record(partial).unlink()
    return description


def verify(path: Path) -> Description:
    """The description of a finished file. Raises ValueError if the file has no description, or if the checksum does not
    match."""
    description = describe(path) if path.is_file() else None
    if description is None:
        raise ValueError(f"{path} is not a finished token file with a {sidecar(path).name} next to it")
    if checksum(path) != description.crc32:
        raise ValueError(f"{path} is damaged: it has a wrong checksum; create it again")
    return description


class _Writer:
    def __init__(self, recipe: Preparation, file: BinaryIO, partial: Path, progress: Progress):
        self._recipe, self._file, self._partial = recipe, file, partial
        self._progress, self._renewed = progress, time.monotonic()

    def run(self, report: Callable[[Report], None]) -> Progress:
        """Writes the remaining tokens. Returns when all tokens are on the disk."""
        corpus = self._recipe.corpus
        start = Position(self._progress.file, self._progress.offset)
        begun, total = corpus.done(start), sum(corpus.sizes)
        try:
            for made in self._recipe.parts(start):
                self._add(made)
                if time.monotonic() > self._renewed + SURE_SECONDS:
                    self._renew()
                report(Report(corpus.done(made.behind), total, begun, self._progress.tokens))
        finally:
            self._renew()
        return self._progress

    def _add(self, made: Made) -> None:
        content = made.tokens.tobytes()
        self._file.write(content)
        now = self._progress
        self._progress = replace(
            now,
            file=made.behind.file,
            offset=made.behind.offset,
            tokens=now.tokens + len(made.tokens),
            documents=now.documents + made.documents,
            crc32=zlib.crc32(content, now.crc32),
            largest=max(now.largest, made.largest),
            packed=made.packed if now.packed is None or made.packed is None else now.packed + made.packed,
        )

    def _renew(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        record = _record(self._partial)
        new = record.with_suffix(".new")
        new.write_text(json.dumps(asdict(self._progress)))
        new.replace(record)
        self._renewed = time.monotonic()


def _finished(out: Path, digest: str) -> Description | None:
    """The description of `out`; None if there is no such file.

    Raises ValueError if a different recipe or program made the file.
    """
    if not out.exists():
        return None
    description = describe(out)
    if description is None:
        raise ValueError(f"{out} exists and was not made by this command; name another file")
    if description.recipe != digest:
        raise ValueError(f"{out} was made from a different text or tokenizer; remove it or name another file")
    return description


def _continue(file: BinaryIO, partial: Path, digest: str, recipe: Preparation) -> Progress:
    """Truncates the partial file to the part that its record describes, and returns the progress of this part.

    Truncates it to nothing if there is no valid record for this recipe.
    """
    itemsize = DTYPES[recipe.dtype].itemsize
    progress = Progress(digest)
    try:
        found = Progress(**json.loads(_record(partial).read_text()))
        found = replace(found, packed=Packed(**found.packed) if found.packed else None)  # type: ignore[arg-type]
        if found.recipe == digest and checksum(partial, found.tokens * itemsize) == found.crc32:
            progress = found
    except (OSError, ValueError, TypeError):
        pass
    file.truncate(progress.tokens * itemsize)
    file.seek(0, os.SEEK_END)
    return progress


def _record(partial: Path) -> Path:
    return partial.with_name(partial.name + ".json")


@contextmanager
def _exclusive(partial: Path) -> Iterator[BinaryIO]:
    """The partial file, opened and locked. Blocks while another process holds the lock.

    The lock is released when the context or the process ends.
    """
    while True:
        file = partial.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if partial.exists() and os.fstat(file.fileno()).st_ino == partial.stat().st_ino:
                yield file
                return
        finally:
            file.close()
        # Another process has meanwhile renamed or removed the partial file, so the opened file is a different one.
