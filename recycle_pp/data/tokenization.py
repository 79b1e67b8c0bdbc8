"""Tokenises text once into a file. An interruption costs only seconds.

    recipe = Recipe(Corpus.of(["corpus.parquet"]), load("models/smollm"))
    description = tokenise(recipe, Path("train.bin"), report=print)     # blocks; after an interruption, call it again
    description = verify(Path("train.bin"))                             # compares the checksum

Until the file is complete, its tokens are in `train.bin.partial`. `train.bin.partial.json` records the number of
durable tokens and the position in the text. This record is renewed every few seconds. A resumed file is identical to
one made without interruption. `train.bin` appears by a rename, after its description and all its bytes have reached the
disk.
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
from typing import BinaryIO

import numpy as np

from .documents import Corpus, Position
from .token_file import DTYPES, Description, checksum, describe, sidecar, write_description
from .tokenizer import Tokenizer

TOGETHER = 1 << 19  # characters in one call of the tokenizer; the call delays a Ctrl-C by a fraction of a second
SURE_SECONDS = 5.0  # seconds between two renewals of the record
VERSION = 1  # version of this method; with a new version all files are made again


@dataclass(frozen=True)
class Recipe:
    """The inputs that determine every token of the file."""

    corpus: Corpus
    tokenizer: Tokenizer

    @property
    def digest(self) -> str:
        """Digest of the tokenizer and of the files' names, sizes and times, without their contents."""
        corpus = self.corpus
        files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in corpus.files]
        words = (VERSION, self.tokenizer.digest, corpus.column, files)
        return hashlib.sha256(repr(words).encode()).hexdigest()[:32]

    @property
    def dtype(self) -> str:
        return "uint32" if self.tokenizer.vocabulary > 1 << 16 else "uint16"


@dataclass(frozen=True)
class Progress:
    """The durable part of a file under construction."""

    recipe: str
    file: int = 0  # with `offset`, the `Position` in the text
    offset: int = 0
    tokens: int = 0
    documents: int = 0
    crc32: int = 0


@dataclass(frozen=True)
class Report:
    """The progress of a call. done: finished bytes of text; total: all bytes; begun: bytes finished before the call."""

    done: int
    total: int
    begun: int
    tokens: int


def tokenise(recipe: Recipe, out: Path, report: Callable[[Report], None] = lambda report: None) -> Description:
    """Makes `out` and its description, unless they exist for the same recipe. Blocks until both exist.

    After a KeyboardInterrupt or any other exception, another call continues the work. A second process with the same
    file waits for the first.

    Raises:
        ValueError: `out` was made by another recipe or program, or the text cannot be read.
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
        description = Description(
            recipe.dtype, progress.tokens, progress.documents, recipe.tokenizer.vocabulary,
            recipe.tokenizer.separator, progress.crc32, digest,
        )  # fmt: skip
        write_description(out, description)
        partial.rename(out)
        _record(partial).unlink()
    return description


def verify(path: Path) -> Description:
    """The description of a finished file. Raises ValueError if it has none, or if the checksum of the file differs."""
    description = describe(path) if path.is_file() else None
    if description is None:
        raise ValueError(f"{path} is not a finished token file with a {sidecar(path).name} beside it")
    if checksum(path) != description.crc32:
        raise ValueError(f"{path} is damaged: it has a wrong checksum; create it again")
    return description


class _Writer:
    def __init__(self, recipe: Recipe, file: BinaryIO, partial: Path, progress: Progress):
        self._recipe, self._file, self._partial = recipe, file, partial
        self._progress, self._renewed = progress, time.monotonic()

    def run(self, report: Callable[[Report], None]) -> Progress:
        """Writes the remaining tokens. Returns when all tokens are on the disk."""
        corpus = self._recipe.corpus
        begun, total = corpus.done(Position(self._progress.file, self._progress.offset)), sum(corpus.sizes)
        try:
            for texts, ends, behind in self._batches():
                self._add(texts, ends, behind)
                if time.monotonic() > self._renewed + SURE_SECONDS:
                    self._renew()
                report(Report(corpus.done(behind), total, begun, self._progress.tokens))
        finally:
            self._renew()
        return self._progress

    def _batches(self) -> Iterator[tuple[list[str], list[bool], Position]]:
        texts: list[str] = []
        ends: list[bool] = []
        start = behind = Position(self._progress.file, self._progress.offset)
        size = 0
        for piece, behind in self._recipe.corpus.pieces(start):
            texts.append(piece.text)
            ends.append(piece.ends)
            size += len(piece.text) + 64  # + 64: for tiny documents the number matters, not the length
            if size >= TOGETHER:
                yield texts, ends, behind
                texts, ends, size = [], [], 0
        if texts:
            yield texts, ends, behind

    def _add(self, texts: list[str], ends: list[bool], behind: Position) -> None:
        tokenizer, dtype = self._recipe.tokenizer, DTYPES[self._recipe.dtype]
        separator = np.array([tokenizer.separator], dtype)
        parts = []
        for ids, end in zip(tokenizer.encode(texts), ends, strict=True):
            parts += [ids.astype(dtype), separator] if end else [ids.astype(dtype)]
        tokens = np.concatenate(parts)
        content = tokens.tobytes()
        self._file.write(content)
        now = self._progress
        self._progress = replace(
            now,
            file=behind.file,
            offset=behind.offset,
            tokens=now.tokens + len(tokens),
            documents=now.documents + sum(ends),
            crc32=zlib.crc32(content, now.crc32),
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
    """The description of `out`; None if there is no such file. Raises ValueError if another recipe or another program
    made the file."""
    if not out.exists():
        return None
    description = describe(out)
    if description is None:
        raise ValueError(f"{out} exists and was not made by this command; name another file")
    if description.recipe != digest:
        raise ValueError(f"{out} was made from another text or by another tokenizer; remove it or name another file")
    return description


def _continue(file: BinaryIO, partial: Path, digest: str, recipe: Recipe) -> Progress:
    """Cuts the partial file to its durable part, or to nothing if it cannot be used. Returns the progress of this
    part."""
    itemsize = DTYPES[recipe.dtype].itemsize
    progress = Progress(digest)
    try:
        found = Progress(**json.loads(_record(partial).read_text()))
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
    """The partial file, locked by this process. Blocks while another process holds the lock. A process that dies
    releases it."""
    while True:
        file = partial.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if partial.exists() and os.fstat(file.fileno()).st_ino == partial.stat().st_ino:
                yield file
                return
        finally:
            file.close()
        # Another process has finished and renamed the file. So this process has opened the finished file, or one that
        # no longer has a name, and tries again.
