"""Reads a file of JSON lines. A line is a record; its text in a given column is a document."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .piece import Piece

LONGEST = 1 << 28  # maximum bytes of a line


def pieces(file: Path, column: str, offset: int) -> Iterator[Piece]:
    """The documents from the line at byte `offset` on. Skips empty lines."""
    for record, place, after in records(file, [column], offset):
        yield Piece(_text(record, column, place), True, after)


def records(file: Path, columns: Sequence[str], offset: int) -> Iterator[tuple[Any, str, int]]:
    """Yields (data of a line, its place for messages, the offset after it) from byte `offset` on. Skips empty lines.

    A record keeps all its keys, whatever `columns` is.
    """
    with file.open("rb") as opened:
        opened.seek(offset)
        while line := opened.readline(LONGEST):
            place = f"{file}, byte {offset}"
            if len(line) == LONGEST:
                raise ValueError(f"{place}: a line has more than {LONGEST} bytes")
            offset += len(line)
            if line.strip():
                yield _record(line, place), place, offset


def extent(file: Path) -> int:
    return file.stat().st_size


def _record(line: bytes, place: str) -> Any:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: this line is not JSON ({str(error) or type(error).__name__})") from None
    if b"\\ud" in line.lower():  # the record may contain half of a surrogate pair, which UTF-8 cannot encode
        record = json.loads(json.dumps(record, ensure_ascii=False).encode(errors="replace"))
    return record


def _text(record: Any, column: str, place: str) -> str:
    if not isinstance(record, dict) or not isinstance(record.get(column), str):
        keys = ", ".join(map(str, record)) if isinstance(record, dict) else "no object"
        raise ValueError(f"{place}: this line has no text in {column!r}; it has {keys}. data.column names the column")
    return record[column]
