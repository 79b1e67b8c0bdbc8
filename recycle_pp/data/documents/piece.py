"""The unit that a format of documents yields."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Text to tokenise separately. ends: a document ends after it; next: the offset after it."""

    text: str
    ends: bool
    next: int
