"""Reads a Parquet file. A row is a record; its text in a given column is a document. Needs pyarrow."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .piece import Piece, without_nulls

ROWS = 1024  # number of rows read at once
TEXT = re.compile("(dictionary<values=)?(large_)?string(_view)?(, .*)?")  # types of a column of text


def pieces(file: Path, column: str, offset: int) -> Iterator[Piece]:
    """The documents from row `offset` on. Skips rows without text. Does not read earlier row groups."""
    with _open(file) as table:
        kinds = {field.name: str(field.type) for field in table.schema_arrow}
        if not TEXT.fullmatch(kinds.get(column, "")):
            raise ValueError(
                f"{file} has no text in {column!r}; its columns are "
                f"{', '.join(f'{name} ({kind})' for name, kind in kinds.items())}. data.column names the column"
            )
    for record, _, after in records(file, [column], offset):
        if record[column] is not None:
            yield Piece(record[column], True, after)


def records(file: Path, columns: Sequence[str], offset: int) -> Iterator[tuple[dict[str, Any], str, int]]:
    """Yields (row, its place for messages, the offset after it) from row `offset` on.

    A row contains the columns in `columns` that the file has.
    """
    with _open(file) as table:
        held = [field.name for field in table.schema_arrow if field.name in columns]
        first = 0
        for group in range(table.num_row_groups):
            rows = table.metadata.row_group(group).num_rows
            if first + rows > offset:
                yield from _rows(file, table, group, held, first, offset)
            first += rows


def extent(file: Path) -> int:
    with _open(file) as table:
        return table.metadata.num_rows


def _rows(
    file: Path, table: Any, group: int, columns: list[str], row: int, offset: int
) -> Iterator[tuple[dict[str, Any], str, int]]:
    batches = table.iter_batches(ROWS, row_groups=[group], columns=columns)
    while True:
        try:
            batch = next(batches, None)
        except (OSError, ValueError) as error:  # covers pyarrow's exceptions
            raise ValueError(f"{file}, row {row}: {_line(error)}") from None
        if batch is None:
            return
        if row + len(batch) > offset:
            for record in batch.to_pylist():
                row += 1
                if row > offset:
                    cells = {name: without_nulls(value) for name, value in record.items()}
                    yield cells, f"{file}, row {row - 1}", row
        else:
            row += len(batch)


def _open(file: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ValueError(
            f"reading {file} needs the package pyarrow; pip install -e '.[hf]' in the clone of recycle_pp"
        ) from None
    try:
        return pyarrow.parquet.ParquetFile(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is not a Parquet file: {_line(error)}") from None


def _line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
