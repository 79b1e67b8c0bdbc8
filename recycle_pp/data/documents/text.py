"""Reads a text file as one document, in pieces that can be tokenised separately without changing the tokens.

A piece ends after a line break that is not followed by white space. Tokenizers that first split at white space (all
byte-level ones) never join text across such a break. Tokenizers that mark the beginning of a text (SentencePiece) are
an exception: they add a mark to each piece, about one per mebibyte.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from .piece import Piece

SIZE = 1 << 20  # approximate bytes of a piece
LONGEST = 1 << 22  # bytes after which a piece without a suitable line break is cut between any two characters
CUT = re.compile(rb"\n(?=[^\s])")


def pieces(file: Path, column: str, offset: int) -> Iterator[Piece]:
    """The pieces from byte `offset` on. Invalid UTF-8 becomes U+FFFD."""
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
    """Number of bytes in the piece: up to the last suitable line break or, in a block of LONGEST bytes without one, up
    to the last whole character. None if more bytes must be read."""
    breaks = [found.end() for found in CUT.finditer(block, max(0, len(block) - SIZE))]
    if breaks:
        return breaks[-1]
    if len(block) < LONGEST:
        return None
    end = len(block)
    while block[end - 1] & 0xC0 == 0x80 and end > len(block) - 4:  # moves the cut out of a UTF-8 character
        end -= 1
    return end - 1 if end > 1 else len(block)
