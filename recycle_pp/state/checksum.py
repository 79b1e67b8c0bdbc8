"""What a finished checkpoint remembers of its files, so that a damaged one is found before it is loaded."""

from __future__ import annotations

import json
import stat
import zlib
from pathlib import Path

ABOUT = "about.json"  # what a resume needs to know of a checkpoint, and its files with their fingerprints


def fingerprint(path: Path) -> list[int]:
    """[bytes, CRC-32 of them] of a file."""
    size, crc = 0, 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return [size, crc]


def damage(path: Path, step: int) -> str | None:
    """What is wrong with the files of the finished checkpoint of `step` steps, or None. Reads all of them."""
    try:
        about = json.loads(_regular(path / ABOUT).read_text())
        if about["step"] != step:
            return f"{path} holds the state after {about['step']} steps, which is not what its name says"
        files = about["files"]
        if ".metadata" not in files:
            return f"{path / ABOUT} does not list the files of a checkpoint"
        for name, (size, crc) in files.items():
            now = fingerprint(_regular(path / name))
            if now != [size, crc]:
                what = f"its {size} bytes" if now[0] != size else "the bytes that were written"
                return f"{path / name} does not have {what}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _regular(path: Path) -> Path:
    """ValueError for what is no file, such as a pipe, which would block its reader for ever."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path} is not a regular file")
    return path
