"""A row of tokens, whatever file they come from.

    source = TokenSource("train.bin", FileTokens.open("train.bin", np.dtype("<u2"), count))
    len(source), source.slice(0, 1025)

A format is a function that makes one: `raw_text.read`, `token_file.read`, `megatron.read`. Text is held in memory; of
a token file a slice reads its own bytes only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .file_tokens import FileTokens, fingerprint


@dataclass(frozen=True)
class TokenSource:
    """
    name       what messages call it
    tokens     (n,) whole numbers, in memory or in a file
    separator  the token behind every document; None if the file does not name it
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
        """Of the whole file's tokens, as `file_tokens.fingerprint` gives it."""
        return fingerprint(self.tokens) if isinstance(self.tokens, np.ndarray) else self.tokens.fingerprint
