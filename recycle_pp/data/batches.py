"""Which tokens a micro-batch holds: a pure function of (seed, step, g), whoever asks.

    batches = Batches(settings)
    inputs, targets = batches.batch(step, g)        # (b, T) int64 each, targets are the inputs one token on
    batches.sample_ids(step, g)                     # the b windows of the training text, for the log of ids
    inputs, targets = batches.validation(i)         # of the held-out last part

The training text is cut into windows of T tokens. Sample n of the run (n = (step G + g) b + j) is window n of a keyed
permutation of all windows, then of another one: within an epoch none is skipped or seen twice, and neither the number
of workers nor a resume plays a part.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recycle_pp.config.settings import Settings

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}  # not the library's own text
ROUNDS = 4  # of the Feistel network: four make a pseudo-random permutation (Luby and Rackoff 1988)
MASK = (1 << 64) - 1


class Batches:
    """The micro-batches of a run.

    Attributes:
        ignores: whether some labels are -100 and do not count.
        fingerprint: of the tokens; two workers or runs with equal ones read the same text.
        validations: how many different validation micro-batches there are.

    Raises:
        ValueError: the path is missing, empty, too short, or holds a token outside the vocabulary.
    """

    ignores = False

    def __init__(self, settings: Settings):
        self._T, self._b = settings.model.sequence, settings.parallel.microbatch_size
        self._G = settings.parallel.pipelines * settings.parallel.microbatches
        self._seed, self._vocabulary = settings.run.seed, settings.model.vocabulary
        tokens, self.name = _tokens(settings.data.path)
        self.fingerprint = _fingerprint(tokens)

        held_out = int(len(tokens) * settings.data.validation_share)
        self._train, self._held_out = tokens[: len(tokens) - held_out], tokens[len(tokens) - held_out :]
        self.windows = max(0, (len(self._train) - 1) // self._T)
        self.validations = max(0, (len(self._held_out) - 1) // self._T) // self._b
        if self.windows < 1:
            raise ValueError(
                f"data.path: {self.name} has {len(tokens)} tokens, too few for one training sample of "
                f"model.sequence={self._T} beside the held-out part"
            )
        if tokens.dtype == np.uint8:  # a memory-mapped file is checked as it is read
            self._check(tokens)

    def batch(self, step: int, g: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of micro-batch g of step `step`, each (b, T) int64."""
        return self._stack(self._train, self.sample_ids(step, g))

    def sample_ids(self, step: int, g: int) -> list[int]:
        """The windows that micro-batch g of step `step` is made of."""
        first = (step * self._G + g) * self._b
        return [
            permuted(n % self.windows, self.windows, (self._seed, n // self.windows))
            for n in range(first, first + self._b)
        ]

    def validation(self, i: int) -> tuple[Tensor, Tensor]:
        """The i-th held-out micro-batch (they repeat after `validations`), as `batch`."""
        if not self.validations:
            raise ValueError(
                f"data.validation_share leaves fewer than {self._b} held-out samples of {self._T} tokens of "
                f"{self.name}; raise it or set run.validate_every=0"
            )
        first = i % self.validations * self._b
        return self._stack(self._held_out, list(range(first, first + self._b)))

    def _stack(self, tokens: np.ndarray, windows: list[int]) -> tuple[Tensor, Tensor]:
        rows = np.stack([tokens[w * self._T : w * self._T + self._T + 1] for w in windows])
        self._check(rows)
        both = torch.from_numpy(rows.astype(np.int64))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def _check(self, tokens: np.ndarray) -> None:
        if (largest := int(tokens.max())) >= self._vocabulary:
            raise ValueError(
                f"data.path: {self.name} holds token {largest}; model.vocabulary must be at least {largest + 1}, "
                f"it is {self._vocabulary}"
            )


def permuted(i: int, n: int, key: tuple[int, ...]) -> int:
    """Where a permutation of range(n), drawn by `key`, sends i: a Feistel network, walked until it lands in range."""
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    keys = _round_keys(key)
    while True:
        left, right = i >> half, i & low
        for round_key in keys:
            left, right = right, left ^ (_mixed(right ^ round_key) & low)
        i = left << half | right
        if i < n:
            return i


def _round_keys(key: tuple[int, ...]) -> list[int]:
    digest = hashlib.sha256(repr(key).encode()).digest()
    return [int.from_bytes(digest[8 * r : 8 * r + 8], "little") for r in range(ROUNDS)]


def _mixed(x: int) -> int:
    """The finaliser of splitmix64 (Steele et al. 2014): every output bit depends on every input bit."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def _tokens(path: str | None) -> tuple[np.ndarray, str]:
    """The tokens at `path` (uint8 bytes of text, uint16 of a .bin) and what to call them."""
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        return _text(_files(root, ".py")), "Python's standard library"
    place = Path(path)
    if not place.exists():
        raise ValueError(f"data.path: {path} does not exist")
    if place.suffix == ".bin":
        if place.stat().st_size < 2:
            raise ValueError(f"data.path: {path} is empty")
        return np.memmap(place, dtype=np.uint16, mode="r"), path
    tokens = _text(_files(place) if place.is_dir() else [place])
    if not len(tokens):
        raise ValueError(f"data.path: {path} holds no text")
    return tokens, path


def _files(root: Path, suffix: str = "") -> Iterator[Path]:
    """The files below `root` in an order that every machine agrees on."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in SKIPPED and not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(suffix) and name[0] != ".")


def _text(files: Iterator[Path] | list[Path]) -> np.ndarray:
    return np.frombuffer(b"".join(file.read_bytes() for file in files), dtype=np.uint8)


def _fingerprint(tokens: np.ndarray) -> str:
    """SHA-256 of the tokens' count and bytes; of a large file 256 pieces spread over it."""
    digest = hashlib.sha256(str((len(tokens), tokens.dtype)).encode())
    size, pieces = 1 << 16, 256
    if len(tokens) <= size * pieces:
        digest.update(tokens.tobytes())
    else:
        for start in np.linspace(0, len(tokens) - size, pieces).astype(np.int64):
            digest.update(tokens[start : start + size].tobytes())
    return digest.hexdigest()[:16]
