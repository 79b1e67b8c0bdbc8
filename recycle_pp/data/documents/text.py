"""A text file: one document, in pieces that tokenise as the whole does.

A piece ends behind a line break that no white space follows: tokenizers that split at white space first (all byte-level
ones) never join what stands on its two sides. Those that mark the beginning of a text (SentencePiece's) put one more
mark, once a mebibyte.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from .piece import Piece

SIZE = 1 << 20  # bytes of a piece, about
LONGEST = 1 << 22  # ... at most: then it is cut anywhere
CUT = re.compile(rb"\n(?=[^\s])")


def pieces(file: Path, column: str, offset: int) -> Iterator[Piece]:
    """From byte `offset` on; what is no UTF-8 becomes U+FFFD."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        while offset < size:
            opened.seek(offset)
            block = opened.read(SIZE)
            while offset + len(block) < size and (end := _end(block)) is None:
                block += opened.read(SIZE)
            if offset + len(block) < size:
                block = block[:end]
            if not block:  # the file has become shorter
                return
            offset += len(block)
            yield Piece(block.decode(errors="replace"), offset >= size, offset)


def extent(file: Path) -> int:
    return file.stat().st_size


def _end(block: bytes) -> int | None:
    """Where to cut, behind the last good line break; None: read on."""
    breaks = [found.end() for found in CUT.finditer(block, max(0, len(block) - SIZE))]
    if breaks:
        return breaks[-1]
    if len(block) < LONGEST:
        return None
    end = len(block)
    while block[end - 1] & 0xC0 == 0x80 and end > len(block) - 4:  # not inside of a character
        end -= 1
    return end - 1 if end > 1 else len(block)
