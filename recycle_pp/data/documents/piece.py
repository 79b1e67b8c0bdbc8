"""The text that the formats of documents yield."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Text to tokenise separately.

    ends  whether a document ends after the text
    next  the offset after the text, see `documents`
    """

    text: str
    ends: bool
    next: int
