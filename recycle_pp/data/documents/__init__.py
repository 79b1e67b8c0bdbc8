"""The documents of text files, .jsonl and .parquet, in one order, from any place in it.

    corpus = Corpus.of(["wiki.parquet", "notes"], column="text")
    for piece in corpus.pieces(Position(0, 0)):      # piece.text, piece.ends, piece.next: where to go on behind it
        ...

A format is a module with `pieces(file, column, offset)`; `offset` is its own: a byte of a text file or of a .jsonl, a
row of a .parquet. A text file is one document, which comes in pieces; the others hold one document a line or row.
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
    """The piece that begins at `offset` of the file number `file`."""

    file: int
    offset: int


@dataclass(frozen=True)
class Corpus:
    """files: in order, with their sizes in bytes; column: of .jsonl and .parquet, the one that holds the text."""

    files: tuple[Path, ...]
    sizes: tuple[int, ...]
    column: str

    @classmethod
    def of(cls, paths: Sequence[str], column: str = "text") -> Corpus:
        """The files at `paths`, folders unfolded: their .jsonl and .parquet files if they have any, else all.

        Raises:
            ValueError: nothing there, empty, or packed; a sentence without the key.
        """
        found: list[Path] = []
        for path in map(Path, paths):
            if not path.exists():
                raise ValueError(f"{path} does not exist")
            inside = list(files(path)) if path.is_dir() else [path]
            found += [file for file in inside if file.suffix in FORMATS] or inside
        for file in found:
            if file.suffix in PACKED:
                raise ValueError(f"{file} is packed; unpack it first")
        sizes = tuple(file.stat().st_size for file in found)
        if not sum(sizes):
            raise ValueError(f"{', '.join(map(str, paths))} holds no text")
        return cls(tuple(found), sizes, column)

    def pieces(self, start: Position) -> Iterator[tuple[Piece, Position]]:
        """Every piece from `start` on, and the position behind it; ValueError names the file and the place."""
        offset = start.offset
        for number in range(start.file, len(self.files)):
            for piece in self._format(number).pieces(self.files[number], self.column, offset):
                yield piece, Position(number, piece.next)
            offset = 0

    def done(self, position: Position) -> int:
        """About how many bytes lie before a position."""
        if position.file >= len(self.files):
            return sum(self.sizes)
        extent = self._format(position.file).extent(self.files[position.file])
        return sum(self.sizes[: position.file]) + self.sizes[position.file] * position.offset // max(1, extent)

    def _format(self, number: int) -> ModuleType:
        return FORMATS.get(self.files[number].suffix, text)
