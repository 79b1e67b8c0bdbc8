"""Reads the documents of text files, .jsonl, .parquet and saved datasets, in a fixed order and from any position.

    corpus = Corpus.of(["wiki.parquet", "notes"], column="text")
    for piece, behind in corpus.pieces(Position(0, 0)):      # behind: position after the piece
        ...                                                  # piece.text; piece.ends: a document ends here

    for record, place, behind in corpus.records(["messages"], Position(0, 0)): ...      # JSON lines and rows of tables

A format is a module with `pieces(file, column, offset)`, `extent(file)` and, if it has records, `records(file, columns,
offset)`. The offset counts bytes in a text file or .jsonl, and rows in the other formats; `extent` is the offset of the
end. A text file is one document, split into pieces. The other formats contain one document per line or row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from recycle_pp.data.raw_text import files

from . import arrow, jsonl, parquet, text
from .piece import Piece

FORMATS = {".jsonl": jsonl, ".ndjson": jsonl, ".parquet": parquet}
PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip", ".lz4", ".7z", ".tar", ".tgz")


@dataclass(frozen=True)
class Position:
    """The start of a piece: `offset` in file number `file`."""

    file: int
    offset: int


@dataclass(frozen=True)
class Corpus:
    """Files with text, in order.

    files   paths of the files; a saved dataset is a folder
    sizes   bytes of each file
    column  the column with the text, in .jsonl, .parquet and saved datasets
    """

    files: tuple[Path, ...]
    sizes: tuple[int, ...]
    column: str

    @classmethod
    def of(cls, paths: Sequence[str], column: str = "text") -> Corpus:
        """The files at `paths`. A saved dataset counts as one file.

        A folder stands for its .jsonl and .parquet files if it has any, else for all its files.

        Raises:
            ValueError: a path is missing, empty, or compressed; the message does not name the configuration key.
        """
        found: list[Path] = []
        for path in map(Path, paths):
            if not path.exists():
                raise ValueError(f"{path} does not exist")
            if path.is_dir() and arrow.is_dataset(path):
                found.append(path)
                continue
            inside = list(files(path)) if path.is_dir() else [path]
            found += [file for file in inside if file.suffix in FORMATS] or inside
        for file in found:
            if file.suffix in PACKED:
                raise ValueError(f"{file} is compressed; decompress it first")
        sizes = tuple(arrow.size(file) if file.is_dir() else file.stat().st_size for file in found)
        if not sum(sizes):
            raise ValueError(f"{', '.join(map(str, paths))} contains no text")
        return cls(tuple(found), sizes, column)

    @property
    def identity(self) -> list[tuple[str, int, int]]:
        """(name, size, time of the last change) of every file."""
        stats = [(file / "state.json" if file.is_dir() else file).stat() for file in self.files]
        return [(file.name, of.st_size, of.st_mtime_ns) for file, of in zip(self.files, stats, strict=True)]

    @property
    def cuts(self) -> tuple[int, ...]:
        """(version of the rule for cutting text files,) if the corpus has a file that is cut; else ()."""
        long = (size > text.SIZE and format_of(file) is text for file, size in zip(self.files, self.sizes, strict=True))
        return (text.CUTS,) * any(long)

    def pieces(self, start: Position) -> Iterator[tuple[Piece, Position]]:
        """Yields (piece, position after the piece) for every piece from `start` on.

        Raises ValueError if the text cannot be read; the message names the file and the place in it.
        """
        offset = start.offset
        for number in range(start.file, len(self.files)):
            for piece in self._format(number).pieces(self.files[number], self.column, offset):
                yield piece, Position(number, piece.next)
            offset = 0

    def records(self, columns: Sequence[str], start: Position) -> Iterator[tuple[Any, str, Position]]:
        """Yields (record, its place for messages, position after it) for every record from `start` on.

        A record contains at least the columns in `columns` that the file has. Raises ValueError like `pieces`.
        """
        offset = start.offset
        for number in range(start.file, len(self.files)):
            for record, place, after in self._format(number).records(self.files[number], columns, offset):
                yield record, place, Position(number, after)
            offset = 0

    def done(self, position: Position) -> int:
        """Approximate number of bytes before a position."""
        if position.file >= len(self.files):
            return sum(self.sizes)
        extent = self._format(position.file).extent(self.files[position.file])
        return sum(self.sizes[: position.file]) + self.sizes[position.file] * position.offset // max(1, extent)

    def _format(self, number: int) -> ModuleType:
        return format_of(self.files[number])


def format_of(file: Path) -> ModuleType:
    return arrow if file.is_dir() else FORMATS.get(file.suffix, text)
