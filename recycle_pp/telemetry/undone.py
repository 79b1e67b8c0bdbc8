"""Removes rolled-back steps from metrics.jsonl and samples.jsonl, which have one line per step.

cut(run.metrics, 20)       # removes all lines from the first one with step 20 or later
renew(run.events)          # replaces the file by a copy; a process that has the old file open cannot change the copy
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

CHUNK = 1 << 20  # bytes


class _Line(msgspec.Struct):
    step: int


_decoder = msgspec.json.Decoder(_Line)


def cut(path: Path, steps: int) -> int:
    """Keeps the lines of the first `steps` steps. Returns the newest step that has a line; -1 without lines.

    Replaces the file by one with the kept lines at the same offsets. A reader with the old file open reads it to the
    end, and `Follower` finds its place in the new file. Blocks. Raises OSError if the new file cannot be written.
    """
    newest = -1
    with suppress(FileNotFoundError), path.open("rb") as file:
        end, newest = _end(file, steps)
        if end < os.fstat(file.fileno()).st_size:
            _replace(path, file, end)
    return newest


def renew(path: Path) -> None:
    """Replaces the file by a copy, without an incomplete last line. Blocks. Raises OSError if the copy cannot be
    written."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        _replace(path, file, _end(file, sys.maxsize)[0])


def _replace(path: Path, file: BinaryIO, end: int) -> None:
    """Replaces the file by its first `end` bytes."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as kept:
            file.seek(0)
            while kept.tell() < end:
                kept.write(file.read(min(CHUNK, end - kept.tell())))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _end(file: BinaryIO, steps: int) -> tuple[int, int]:
    """Returns (end, newest).

    end     offset of the first rolled-back or incomplete line, else the end of the file
    newest  newest step before this offset; -1 without lines
    """
    end, newest = 0, -1
    for line in file:
        step = _step(line)
        if not line.endswith(b"\n") or step >= steps:
            break
        end, newest = end + len(line), max(newest, step)
    return end, newest


def _step(line: bytes) -> int:
    """The step of a line; -1 if it is damaged."""
    try:
        return _decoder.decode(line).step
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return -1
