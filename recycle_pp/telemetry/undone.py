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


def cut(path: Path, steps: int) -> None:
    """Keeps the lines of the first `steps` steps.

    The kept lines are the same bytes at the same place, in a new file with the old name: an open reader reads the old
    one to its end, and `Follower` finds its place in the new one. Blocks. OSError if the new file cannot be written.
    """
    with suppress(FileNotFoundError), path.open("rb") as file:
        end = _end(file, steps)
        if end == os.fstat(file.fileno()).st_size:
            return
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with temporary.open("wb") as kept:
                file.seek(0)
                while kept.tell() < end:
                    kept.write(file.read(min(CHUNK, end - kept.tell())))
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def is_undone(line: bytes, steps: int) -> bool:
    """A line of step `steps` or later; False for one that is not whole."""
    try:
        return _decoder.decode(line).step >= steps
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False


def _end(file: BinaryIO, steps: int) -> int:
    """Where the first undone line begins, or a last one that is not whole; else where the file ends."""
    end = 0
    for line in file:
        if not line.endswith(b"\n") or is_undone(line, steps):
            break
        end += len(line)
    return end
