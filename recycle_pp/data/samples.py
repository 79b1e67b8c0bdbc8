"""The samples of a run. Each is a pure function of (data, seed, number). Does not import torch.

    samples = Samples(settings)
    samples.ids(first, count); samples.train(window)      # (T + 1,) tokens: inputs and, shifted by one, targets
    samples.held_out(i)

A source is cut into windows. Window w contains the tokens w T to w T + T inclusive, so neighbours share one token. With
data.format=chat, window w contains the T marked tokens (`chat.packing`) from w T on, which are one packed sample. The
windows of several sources are numbered consecutively.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from recycle_pp.config.mistakes import UserMistake
from recycle_pp.config.settings import Settings

from . import sources
from .chat.packing import TOKEN, targets_in
from .order import Order, interleaved
from .source import TokenSource


class Samples:
    """The samples of a configuration.

    Attributes:
        name: names of the sources, for messages.
        fingerprint: digest of the tokens; equal fingerprints mean the same data.
        windows: number of training samples; of an island, those in its part, rounded down.
        held_outs: number of held-out samples.
        separator: the token after every document, with data.document_mask; else None.
        counts: whether some labels are ignored, so that the labels of a step must be counted (`counted`).
        packed: name of a source -> statistics of its conversations; empty without data.format=chat.

    Raises:
        ValueError: a path is missing, empty, too short, or contains a token outside the vocabulary.
    """

    def __init__(self, settings: Settings, report: sources.Reporter | None = None):
        data, T, self._vocabulary = settings.data, settings.model.sequence, settings.model.vocabulary
        self._chat = self.counts = data.format == "chat"
        shared = 0 if self._chat else 1
        train, own = sources.training(settings, report), sources.validation(settings, report)
        self.name = ", ".join(source.name for source in train)
        self.fingerprint = _fingerprint([source.fingerprint for source in train], data.weights)
        self.packed = {source.name: source.packed for source in train + own if source.packed is not None}
        cuts = [len(source) - (0 if own else int(len(source) * data.validation_share)) for source in train]
        if self._chat:
            cuts = [cut - cut % T for cut in cuts]
        for source in train + own:
            if isinstance(source.tokens, np.ndarray):
                self._check(source.tokens, source.name)  # tokens of a file are checked when they are read
        self._train = Windows([s.part(0, cut) for s, cut in zip(train, cuts, strict=True)], T, shared)
        self._held_out = Windows(own or [s.part(cut, len(s)) for s, cut in zip(train, cuts, strict=True)], T, shared)
        for source, count in zip(train, self._train.counts, strict=True):
            if count < 1:
                raise ValueError(
                    f"data.path: {source.name} has {len(source)} tokens, too few for one training sample of "
                    f"model.sequence={T}" + ("" if own else " in addition to the held-out part")
                )
        self._order = Order(self._train.counts, data.weights, settings.run.seed, settings.islands.cut)
        self._held_out_order = interleaved(self._held_out.counts, None if own else data.weights)
        self.separator = sources.separator(data, train + own)
        self.windows, self.held_outs = len(self._train) // settings.islands.cut[1], len(self._held_out)

    def ids(self, first: int, count: int) -> list[int]:
        """The windows of samples `first` to `first + count - 1` of the run."""
        return [self._order.window(n) for n in range(first, first + count)]

    def train(self, window: int) -> np.ndarray:
        """The tokens of a window, (T + 1,), or with data.format=chat (T,) marked tokens.

        Like `held_out`, raises UserMistake for a token outside the vocabulary.
        """
        return self._checked(self._train, window)

    def counted(self, window: int) -> int:
        """Number of labels of a training window that are not ignored."""
        return targets_in(self.train(window))

    def held_out(self, number: int) -> np.ndarray:
        """The tokens of a held-out sample, like `train`. Several sources alternate (`order.interleaved`)."""
        return self._checked(self._held_out, int(self._held_out_order[number]))

    def _checked(self, windows: Windows, window: int) -> np.ndarray:
        tokens, name = windows[window]
        self._check(tokens, name)
        return tokens

    def _check(self, tokens: np.ndarray, name: str) -> None:
        tokens = tokens & TOKEN if self._chat else tokens
        if (largest := int(tokens.max())) >= self._vocabulary:
            raise UserMistake(
                f"data.path: {name} contains token {largest}; model.vocabulary must be at least {largest + 1}, "
                f"but it is {self._vocabulary}"
            )
        if tokens.dtype.kind == "i" and int(tokens.min()) < 0:
            raise UserMistake(f"data.path: {name} contains token {int(tokens.min())}, but tokens must be at least 0")


class Windows:
    """The windows of several sources, numbered consecutively.

    shared: number of tokens that neighbouring windows share, 0 or 1
    """

    def __init__(self, parts: Sequence[TokenSource], T: int, shared: int):
        self._parts, self._T, self._shared = parts, T, shared
        self.counts = [max(0, (len(part) - shared) // T) for part in parts]
        self._starts = [0, *accumulate(self.counts)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, window: int) -> tuple[np.ndarray, str]:
        """(T + shared,) tokens, and the name of their source."""
        number = 0
        while window >= self._starts[number + 1]:
            number += 1
        start = (window - self._starts[number]) * self._T
        return self._parts[number].slice(start, start + self._T + self._shared), self._parts[number].name


def _fingerprint(parts: Sequence[str], weights: Sequence[float] | None) -> str:
    if len(parts) == 1:
        return parts[0]
    return hashlib.sha256(repr((list(parts), weights and list(weights))).encode()).hexdigest()[:16]
