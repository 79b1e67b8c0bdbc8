"""Reads raw text, in which each byte is a token. Files follow each other without a separator.

read("book.txt"), read("folder"), read(None)     # None: Python's own sources, real text without a download
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import numpy as np

from .source import TokenSource

SKIPPED = {"site-packages", "dist-packages", "test", "tests"}  # folders with no source files of Python's own library
COMPILED = "__pycache__"  # a folder with this name contains no text, whatever the corpus


def read(path: str | None) -> TokenSource:
    """The tokens, uint8, in memory.

    Raises ValueError if there is no text; the message does not name the configuration key.
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        return TokenSource("Python's standard library", _bytes(files(root, ".py", SKIPPED)))
    place = Path(path)
    tokens = _bytes(files(place) if place.is_dir() else [place])
    if not len(tokens):
        raise ValueError(f"{path} contains no text")
    return TokenSource(path, tokens)


def files(root: Path, suffix: str = "", skipped: Collection[str] = ()) -> Iterator[Path]:
    """The files below `root`, in the same order on every machine. Leaves out hidden files and folders, `COMPILED`, and
    the folders with a name in `skipped`."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in {COMPILED, *skipped} and not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(suffix) and name[0] != ".")


def _bytes(paths: Iterable[Path]) -> np.ndarray:
    return np.frombuffer(b"".join(path.read_bytes() for path in paths), dtype=np.uint8)
