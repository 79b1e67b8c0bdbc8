"""Reads a text file as one document, in pieces that can be tokenised separately without changing the tokens.

A piece ends after a line break between two characters that are not white space, or else before a space between two
letters. The pre-tokenizers of byte-level tokenizers never join text across such a place, and treat a run of white space
at the end of a text differently from one before a word. Tokenizers that mark the beginning of a text (SentencePiece)
are an exception: they add a mark to each piece, about one per mebibyte.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from .piece import Piece

SIZE = 1 << 20  # approximate bytes of a piece
LONGEST = 1 << 22  # bytes after which a piece with no suitable place is cut between any two characters
CUTS = 2  # version of the rule for cutting; after a change, existing token files are no longer used
# White space of two and three bytes: U+0085, U+00A0, U+1680, U+2000 to U+200A, U+2028, U+2029, U+202F, U+205F, U+3000.
_TWO, _THREE = rb"\xc2[\x85\xa0]", rb"\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80"
# A piece does not end before a slash, because GPT-4o's pre-tokenizer joins punctuation, line breaks and slashes. The
# pattern requires two more bytes, because a white-space character may have three.
LINE = re.compile(rb"(?s:(?<=\S)(?<!%b)(?<!%b)\n(?=[^\s/]..)(?!%b|%b))" % (_TWO, _THREE, _TWO, _THREE))
WORD = re.compile(rb"(?<=[A-Za-z])(?= [A-Za-z])")


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
    """Number of bytes in the piece: up to the last suitable place or, in a block of LONGEST bytes without one, up to
    the last whole character. None if more bytes must be read."""
    for place in (LINE, WORD):
        ends = [found.end() for found in place.finditer(block, max(0, len(block) - SIZE))]
        if ends:
            return ends[-1]
    if len(block) < LONGEST:
        return None
    end = len(block)
    while block[end - 1] & 0xC0 == 0x80 and end > len(block) - 4:  # moves the cut out of a UTF-8 character
        end -= 1
    return end - 1 if end > 1 else len(block)
