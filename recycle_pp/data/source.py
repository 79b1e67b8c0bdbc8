"""A row of tokens from a file of any format.

    source = TokenSource("train.bin", FileTokens.open("train.bin", np.dtype("<u2"), count))
    len(source), source.slice(0, 1025)

Each format has a function that returns a TokenSource: `raw_text.read`, `token_file.read`, `megatron.read`. Text is held
in memory. A slice of a token file reads only the bytes of the slice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .file_tokens import FileTokens, fingerprint


@dataclass(frozen=True)
class TokenSource:
    """A row of tokens.

    name       name of the source, for messages
    tokens     (n,) whole numbers, in memory or in a file
    separator  the token after every document; None if the file does not name it
    """

    name: str
    tokens: np.ndarray | FileTokens
    separator: int | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def slice(self, start: int, stop: int) -> np.ndarray:
        return self.tokens[start:stop]

    def part(self, start: int, stop: int) -> TokenSource:
        tokens = self.tokens
        return replace(self, tokens=tokens[start:stop] if isinstance(tokens, np.ndarray) else tokens.part(start, stop))

    @property
    def fingerprint(self) -> str:
        """`file_tokens.fingerprint` of all tokens of the file."""
        return fingerprint(self.tokens) if isinstance(self.tokens, np.ndarray) else self.tokens.fingerprint
