"""The text that the formats of documents yield."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Piece:
    """Text to tokenise separately.

    ends  whether a document ends after the text
    next  the offset after the text, see `documents`
    """

    text: str
    ends: bool
    next: int


def without_nulls(value: Any) -> Any:
    """`value`, a cell of a table, without the fields that are null. A column of a table has one type, so every object
    in it gets the fields of all others, and a chat template would print them."""
    if isinstance(value, dict):
        return {name: without_nulls(of) for name, of in value.items() if of is not None}
    return [without_nulls(of) for of in value] if isinstance(value, list) else value
