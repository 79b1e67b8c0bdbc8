"""A file of JSON lines: one document per line, in the column that holds the text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from .piece import Piece

LONGEST = 1 << 28  # maximum bytes of a line


def pieces(file: Path, column: str, offset: int) -> Iterator[Piece]:
    """The documents from the line at byte `offset` on. Skips empty lines."""
    with file.open("rb") as opened:
        opened.seek(offset)
        while line := opened.readline(LONGEST):
            if len(line) == LONGEST:
                raise ValueError(f"{file}, byte {offset}: a line has more than {LONGEST} bytes")
            if line.strip():
                yield Piece(_text(line, column, f"{file}, byte {offset}"), True, offset + len(line))
            offset += len(line)


def extent(file: Path) -> int:
    return file.stat().st_size


def _text(line: bytes, column: str, place: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: this line is not JSON ({str(error) or type(error).__name__})") from None
    if not isinstance(record, dict) or not isinstance(record.get(column), str):
        keys = ", ".join(map(str, record)) if isinstance(record, dict) else "no object"
        raise ValueError(f"{place}: this line has no text in {column!r}; it has {keys}. data.column names the column")
    return record[column].encode(errors="replace").decode()  # JSON may contain half of a surrogate pair
