"""Detects damage to a finished checkpoint by checksums of its files, before the checkpoint is loaded."""

from __future__ import annotations

import errno
import json
import stat
import zlib
from pathlib import Path

TABLE = ".metadata"  # torch's table of contents
ABOUT = "about.json"  # the settings that a resume must keep, and the fingerprints of all files
FAILURES = (errno.EIO, errno.ESTALE, errno.EACCES)  # errors of a disk that may recover


def fingerprint(path: Path) -> list[int]:
    """[size in bytes, CRC-32] of a file."""
    size, crc = 0, 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return [size, crc]


def damage(path: Path, step: int) -> str | None:
    """A description of the damage to the finished checkpoint of `step` steps; None if it is intact. Reads all files."""
    try:
        return lasting_damage(path, step)
    except OSError as error:
        return _text(error)


def lasting_damage(path: Path, step: int) -> str | None:
    """Like `damage`, but raises OSError if the disk fails, because the checkpoint may be intact."""
    try:
        about = json.loads(_regular(path / ABOUT).read_text())
        if about["step"] != step:
            return f"{path} is named after a different step: it contains the state after {about['step']} steps"
        files = about["files"]
        if TABLE not in files:
            return f"{path / ABOUT} does not list the files of a checkpoint"
        for name, (size, crc) in files.items():
            now, checksum = fingerprint(_regular(path / name))
            if now != size:
                return f"{path / name} has {now} bytes, expected {size}"
            if checksum != crc:
                return f"{path / name} has a wrong checksum"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, OSError) and error.errno in FAILURES:
            raise
        return _text(error)
    return None


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _regular(path: Path) -> Path:
    """Returns `path`. Raises ValueError if it is not a regular file, because reading from a pipe could block."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path} is not a regular file")
    return path
