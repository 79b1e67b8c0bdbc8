"""Removes undone steps from the files of a run folder that hold a line a step.

cut(run.metrics, 20)       # keeps the lines before the first one of step 20 or later
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

CHUNK = 1 << 20  # bytes


class _Line(msgspec.Struct):
    step: int


_decoder = msgspec.json.Decoder(_Line)


def cut(path: Path, steps: int) -> int:
    """Keeps the lines of the first `steps` steps, and returns the newest step that has a line, -1 if none has.

    The kept lines are the same bytes at the same place, in a new file with the old name: an open reader reads the old
    one to its end, and `Follower` finds its place in the new one. Blocks. OSError if the new file cannot be written.
    """
    newest = -1
    with suppress(FileNotFoundError), path.open("rb") as file:
        end, newest = _end(file, steps)
        if end == os.fstat(file.fileno()).st_size:
            return newest
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with temporary.open("wb") as kept:
                file.seek(0)
                while kept.tell() < end:
                    kept.write(file.read(min(CHUNK, end - kept.tell())))
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    return newest


def _end(file: BinaryIO, steps: int) -> tuple[int, int]:
    """Where the first undone line begins, or a last one that is not whole, else where the file ends; and the newest
    step before that."""
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
