"""The documents of text files, .jsonl and .parquet, in a fixed order, from any position.

    corpus = Corpus.of(["wiki.parquet", "notes"], column="text")
    for piece, behind in corpus.pieces(Position(0, 0)):      # behind: position after the piece
        ...                                                  # piece.text; piece.ends: a document ends here

A format is a module with `pieces(file, column, offset)`. The meaning of `offset` depends on the format: a byte of a
text file or .jsonl, a row of a .parquet. A text file is one document, split into pieces. The others hold one document
per line or row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from recycle_pp.data.raw_text import files

from . import jsonl, parquet, text
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
    """The text files, in order. sizes: bytes of each file. column: the column of .jsonl and .parquet with the text."""

    files: tuple[Path, ...]
    sizes: tuple[int, ...]
    column: str

    @classmethod
    def of(cls, paths: Sequence[str], column: str = "text") -> Corpus:
        """The files at `paths`. For a folder: its .jsonl and .parquet files if it has any, else all files.

        Raises:
            ValueError: a path is missing, empty, or compressed; the message does not name the configuration key.
        """
        found: list[Path] = []
        for path in map(Path, paths):
            if not path.exists():
                raise ValueError(f"{path} does not exist")
            inside = list(files(path)) if path.is_dir() else [path]
            found += [file for file in inside if file.suffix in FORMATS] or inside
        for file in found:
            if file.suffix in PACKED:
                raise ValueError(f"{file} is compressed; decompress it first")
        sizes = tuple(file.stat().st_size for file in found)
        if not sum(sizes):
            raise ValueError(f"{', '.join(map(str, paths))} holds no text")
        return cls(tuple(found), sizes, column)

    def pieces(self, start: Position) -> Iterator[tuple[Piece, Position]]:
        """Yields (piece, position after the piece) for every piece from `start` on. ValueError if the text cannot be
        read; the message names the file and the place."""
        offset = start.offset
        for number in range(start.file, len(self.files)):
            for piece in self._format(number).pieces(self.files[number], self.column, offset):
                yield piece, Position(number, piece.next)
            offset = 0

    def done(self, position: Position) -> int:
        """Approximate number of bytes before a position."""
        if position.file >= len(self.files):
            return sum(self.sizes)
        extent = self._format(position.file).extent(self.files[position.file])
        return sum(self.sizes[: position.file]) + self.sizes[position.file] * position.offset // max(1, extent)

    def _format(self, number: int) -> ModuleType:
        return FORMATS.get(self.files[number].suffix, text)
