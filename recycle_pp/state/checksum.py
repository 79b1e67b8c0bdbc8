"""What a finished checkpoint remembers of its files, so that a damaged one is found before it is loaded."""

from __future__ import annotations

import json
import zlib
from pathlib import Path


def fingerprint(path: Path) -> list[int]:
    """[bytes, CRC-32 of them] of a file."""
    size, crc = 0, 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return [size, crc]


def damage(path: Path) -> str | None:
    """What is wrong with the files of a finished checkpoint; None if nothing is. Reads all of them."""
    try:
        files = json.loads((path / "about.json").read_text())["files"]
        for name, (size, crc) in files.items():
            now = fingerprint(path / name)
            if now != [size, crc]:
                what = f"its {size} bytes" if now[0] != size else "the bytes that were written"
                return f"{path / name} does not have {what}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None
