"""A sequence of tokens from a file of any format.

    source = TokenSource("train.bin", FileTokens.open("train.bin", np.dtype("<u2"), count))
    len(source), source.slice(0, 1025)

Each format has a function that returns a TokenSource: `raw_text.read`, `token_file.read`, `megatron.read`. Text is kept
in memory. A slice of a token file reads only the bytes of the slice.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

import numpy as np

from .file_tokens import FileTokens, fingerprint


@dataclass(frozen=True)
class Packed:
    """Statistics of a file of packed conversations (data.format=chat). All are numbers.

    sequence       tokens of a sample; the file consists of such samples (`chat.packing`)
    samples        samples in the file
    conversations  conversations in the file
    targets        tokens that have a loss
    cut            conversations that were cut because they were longer than a sample
    cut_tokens     tokens that were cut off
    left_out       conversations that are not in the file because none of their tokens has a loss
    """

    sequence: int
    samples: int = 0
    conversations: int = 0
    targets: int = 0
    cut: int = 0
    cut_tokens: int = 0
    left_out: int = 0

    def __add__(self, other: Packed) -> Packed:
        return Packed(self.sequence, *(a + b for a, b in zip(astuple(self)[1:], astuple(other)[1:], strict=True)))

    @property
    def sentence(self) -> str:
        return (
            f"{self.conversations:,} conversations in {self.samples:,} samples of {self.sequence} tokens, of which "
            f"{self.targets:,} have a loss; {self.cut:,} conversations were longer and lost {self.cut_tokens:,} "
            f"tokens; {self.left_out:,} have no token with a loss and were left out"
        )


@dataclass(frozen=True)
class TokenSource:
    """A sequence of tokens.

    name       name of the source, for messages
    tokens     (n,) whole numbers, in memory or in a file
    separator  the token after every document; None if the file does not name it
    packed     statistics of the conversations with data.format=chat; else None
    """

    name: str
    tokens: np.ndarray | FileTokens
    separator: int | None = None
    packed: Packed | None = None

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
