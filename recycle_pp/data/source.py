"""A row of tokens, whatever file they come from.

    source = TokenSource("train.bin", np.memmap("train.bin", np.uint16, "r"))
    len(source), source.slice(0, 1025)

A format is a function that makes one: `raw_text.read`, `token_file.read`, `megatron.read`. What is too large for the
memory is memory-mapped: a slice reads its own bytes only.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class TokenSource:
    """name: what messages call it; tokens: (n,) of whole numbers, in memory or memory-mapped; separator: the token
    behind every document, None where the file does not say."""

    name: str
    tokens: np.ndarray
    separator: int | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def slice(self, start: int, stop: int) -> np.ndarray:
        return self.tokens[start:stop]

    def part(self, start: int, stop: int) -> TokenSource:
        return replace(self, tokens=self.tokens[start:stop])

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the tokens' count and bytes; of a large file 256 pieces spread over it."""
        tokens = self.tokens
        digest = hashlib.sha256(str((len(tokens), tokens.dtype)).encode())
        size, pieces = 1 << 16, 256
        if len(tokens) <= size * pieces:
            digest.update(tokens.tobytes())
        else:
            for start in np.linspace(0, len(tokens) - size, pieces).astype(np.int64):
                digest.update(tokens[start : start + size].tobytes())
        return digest.hexdigest()[:16]
