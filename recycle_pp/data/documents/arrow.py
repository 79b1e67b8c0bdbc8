"""Reads a folder written by `datasets.Dataset.save_to_disk`, with one document or record per row. Needs datasets."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from .piece import Piece, without_nulls

ROWS = 1024  # number of rows read at once


def is_dataset(folder: Path) -> bool:
    """Whether the folder is a saved dataset. Raises ValueError if it contains several datasets, one for each split."""
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
        raise ValueError(f"{folder} contains the splits {', '.join(splits)}; name one, such as {folder / splits[0]}")
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def size(folder: Path) -> int:
    """Total bytes of the files with the rows."""
    return sum(file.stat().st_size for file in folder.glob("*.arrow"))


def pieces(file: Path, column: str, offset: int) -> Iterator[Piece]:
    """The documents from row `offset` on. Skips rows without text."""
    kinds = {name: str(getattr(of, "dtype", of)) for name, of in _open(file).features.items()}
    if kinds.get(column) not in ("string", "large_string"):
        raise ValueError(f"{file} has no text in {column!r}; its columns are {', '.join(kinds)}. data.column names the "
                         "column")  # fmt: skip
    for record, _, after in records(file, [column], offset):
        if record[column] is not None:
            yield Piece(record[column], True, after)


def records(file: Path, columns: Sequence[str], offset: int) -> Iterator[tuple[dict[str, Any], str, int]]:
    """Yields (row, its place for messages, the offset after it) from row `offset` on.

    A row contains the columns in `columns` that the dataset has.
    """
    dataset = _open(file)
    dataset = dataset.select_columns([name for name in dataset.column_names if name in columns])
    for start in range(offset, len(dataset), ROWS):
        found = dataset[start : start + ROWS]
        for i in range(min(ROWS, len(dataset) - start)):
            row = start + i
            cells = {name: without_nulls(values[i]) for name, values in found.items()}
            yield cells, f"{file}, row {row}", row + 1


def extent(file: Path) -> int:
    return len(_open(file))


@lru_cache(maxsize=2)
def _open(file: Path) -> Any:
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"reading {file} needs the package datasets; pip install -e '.[datasets]' in the clone of recycle_pp"
        ) from None
    try:
        return datasets.load_from_disk(str(file))
    except (OSError, ValueError) as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{file} is not a saved dataset: {why}") from None
