"""The micro-batches of a run. Micro-batch g of a step is a pure function of (seed, step, g).

    batches = Batches(settings)
    batch = batches.batch(step, g)        # inputs and labels (b, T) int64 each; labels are shifted by one token
    batches.sample_ids(step, g)           # the numbers of its b samples, for the sample log
    batch = batches.validation(i)         # from the held-out end of the data, or from data.validation_path
    batches.items(step)                   # mean number of labels per micro-batch; None if no label is ignored
    batch = blank(settings)               # zeros of the same shapes

Text is cut into windows of T tokens; conversations are packed into samples of T tokens. A step has G micro-batches of b
samples. Sample j of micro-batch g is sample n = (step G + g) b + j of the run. A keyed permutation of all samples, a
different one in each epoch, maps n to a sample of the data. Each sample thus occurs exactly once in an epoch, whatever
the number of workers and resumes. With data.weights each source has its own order (`order`). With data.build the
samples are those of a user's dataset (`own`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from recycle_pp.config.mistakes import UserMistake
from recycle_pp.config.settings import Settings

from . import own
from .batch import IGNORED, Batch, documents
from .chat.packing import BEGINS, TARGET, TOKEN
from .samples import Samples
from .sources import Reporter


class Batches:
    """The micro-batches of a run.

    Attributes:
        name: name of the data, for messages.
        fingerprint: digest of the tokens; equal fingerprints mean the same text.
        windows: number of training samples per epoch.
        validations: number of different validation micro-batches.

    Raises:
        ValueError: the path is missing, empty, too short, or contains a token outside the vocabulary.
    """

    def __init__(self, settings: Settings):
        self._samples: Samples | own.OwnSamples = samples_of(settings)
        self._b = settings.parallel.microbatch_size
        self._G = settings.parallel.pipelines * settings.parallel.microbatches
        self._T, self._chat = settings.model.sequence, settings.data.format == "chat"
        self.name, self.fingerprint = self._samples.name, self._samples.fingerprint
        self.windows, self.validations = self._samples.windows, self._samples.held_outs // self._b
        self._step_items: tuple[int, float] = (-1, 0.0)  # cached result of `items`: (step, items)
        self._validation_items: tuple[int, float] = (-1, 0.0)  # cached result of `validation_items`: (count, items)

    def batch(self, step: int, g: int) -> Batch:
        """Micro-batch g of step `step`, without `Batch.items`.

        Like the other methods, raises UserMistake if the data cannot be used for training."""
        return self._together([self._samples.train(number) for number in self.sample_ids(step, g)])

    def sample_ids(self, step: int, g: int) -> list[int]:
        """The numbers of the samples in micro-batch g of step `step`."""
        return self._samples.ids((step * self._G + g) * self._b, self._b)

    def validation(self, i: int) -> Batch:
        """The i-th held-out micro-batch, like `batch`. The micro-batches repeat after `validations`."""
        if not self.validations:
            raise UserMistake(
                f"data.validation_share leaves fewer than {self._b} held-out samples of {self._T} tokens of "
                f"{self.name}; raise it or set run.validate_every=0"
            )
        first = i % self.validations * self._b
        return self._together([self._samples.held_out(number) for number in range(first, first + self._b)])

    def items(self, step: int) -> float | None:
        """`Batch.items` of a step; None if no label is ignored. Reads all samples of the step once."""
        if not self._samples.counts:
            return None
        if self._step_items[0] != step:
            numbers = self._samples.ids(step * self._G * self._b, self._G * self._b)
            self._step_items = step, sum(map(self._samples.counted, numbers)) / self._G
        return self._step_items[1]

    def validation_items(self, count: int) -> float | None:
        """`Batch.items` of a validation with `count` micro-batches; None if no label is ignored."""
        if not self._samples.counts:
            return None
        if self._validation_items[0] != count:
            labels = (self.validation(i).labels for i in range(count))
            self._validation_items = count, sum(int((of != IGNORED).sum()) for of in labels) / count
        return self._validation_items[1]

    def _together(self, samples: Sequence[Any]) -> Batch:
        if isinstance(self._samples, own.OwnSamples):
            return own.together(samples)
        rows = torch.from_numpy(np.stack(samples).astype(np.int64))
        return packed(rows) if self._chat else shifted(rows, self._samples.separator)


def samples_of(settings: Settings, report: Reporter | None = None) -> Samples | own.OwnSamples:
    """The samples of a configuration. report: called with the progress if the data must be tokenised."""
    return Samples(settings, report) if settings.data.build is None else own.OwnSamples(settings)


def blank(settings: Settings) -> Batch:
    """Zeros in the shapes of a micro-batch. Each sample is one document."""
    if settings.data.build is not None:
        return own.blank(settings)
    tokens = torch.zeros(settings.parallel.microbatch_size, settings.model.sequence, dtype=torch.int64)
    return Batch(tokens, tokens, more=documents(tokens < 0) if settings.data.masked else {})


def shifted(rows: torch.Tensor, separator: int | None) -> Batch:
    """A micro-batch whose labels are the next tokens. With a separator, attention stays within a document.

    rows: (b, T + 1) tokens

    A separator belongs to the document that follows it. The first token of a document is thus predicted from the
    separator alone, and the last token predicts the next separator. No target is lost, and none is predicted from a
    different document.
    """
    inputs, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    return Batch(inputs, labels, more={} if separator is None else documents(inputs == separator))


def packed(rows: torch.Tensor) -> Batch:
    """A micro-batch of conversations. Attention stays within a conversation. rows: (b, T) marked tokens, see
    `chat.packing`"""
    inputs = rows & TOKEN
    labels = torch.full_like(inputs, IGNORED)
    labels[:, :-1] = torch.where((rows[:, 1:] & TARGET) > 0, inputs[:, 1:], IGNORED)
    return Batch(inputs, labels, more=documents((rows & BEGINS) > 0))
