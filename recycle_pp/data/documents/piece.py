"""What a format of documents yields."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Text to tokenise on its own; `ends`: a document ends behind it; `next`: the offset behind it."""

    text: str
    ends: bool
    next: int
