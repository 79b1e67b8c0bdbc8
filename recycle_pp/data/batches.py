"""Which tokens a micro-batch holds: a pure function of (seed, step, g), whoever asks.

    batches = Batches(settings)
    inputs, targets = batches.batch(step, g)        # (b, T) int64 each, targets are the inputs one token on
    batches.sample_ids(step, g)                     # the b windows of the training text, for the log of ids
    inputs, targets = batches.validation(i)         # of the held-out last part, or of data.validation_path
    batches.more(inputs)                            # with data.document_mask: which document a token is of, and where

The training data are cut into windows of T tokens. Sample n of the run (n = (step G + g) b + j) is window n of a keyed
permutation of all windows, then of another one: within an epoch none is skipped or seen twice, and neither the number
of workers nor a resume plays a part. With data.weights each source has such an order of its own (`order`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from recycle_pp.config.mistakes import UserMistake
from recycle_pp.config.settings import Settings

from .samples import Samples


class Batches:
    """The micro-batches of a run.

    Attributes:
        ignores: whether some labels are -100 and do not count.
        name: of the data, for messages.
        fingerprint: of the tokens; two workers or runs with equal ones read the same text.
        windows: how many training samples an epoch has.
        validations: how many different validation micro-batches there are.

    Raises:
        ValueError: the path is missing, empty, too short, or holds a token outside the vocabulary.
    """

    ignores = False

    def __init__(self, settings: Settings):
        self._samples, self._b = Samples(settings), settings.parallel.microbatch_size
        self._G = settings.parallel.pipelines * settings.parallel.microbatches
        self._T = settings.model.sequence
        self.name, self.fingerprint = self._samples.name, self._samples.fingerprint
        self.windows, self.validations = self._samples.windows, self._samples.held_outs // self._b

    def batch(self, step: int, g: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of micro-batch g of step `step`, each (b, T) int64. Raises UserMistake, as do the others,
        where the data hold what cannot be trained on."""
        return _stack([self._samples.train(window) for window in self.sample_ids(step, g)])

    def sample_ids(self, step: int, g: int) -> list[int]:
        """The windows that micro-batch g of step `step` is made of."""
        return self._samples.ids((step * self._G + g) * self._b, self._b)

    def validation(self, i: int) -> tuple[Tensor, Tensor]:
        """The i-th held-out micro-batch (they repeat after `validations`), as `batch`."""
        if not self.validations:
            raise UserMistake(
                f"data.validation_share leaves fewer than {self._b} held-out samples of {self._T} tokens of "
                f"{self.name}; raise it or set run.validate_every=0"
            )
        first = i % self.validations * self._b
        return _stack([self._samples.held_out(window) for window in range(first, first + self._b)])

    def more(self, inputs: Tensor) -> Mapping[str, Tensor]:
        """What else a model is told of (b, T) inputs: nothing, or with data.document_mask what `documents` gives."""
        return {} if self._samples.separator is None else documents(inputs, self._samples.separator)


def documents(inputs: Tensor, separator: int) -> dict[str, Tensor]:
    """Which document of its sample each token is of (document_ids), and its place there (position_ids), (b, T) int64.

    A separator begins the document behind it: the first token of a document is predicted from the separator alone, and
    the last one predicts the next separator. So no target is lost, and none is predicted from another document.
    """
    begins = inputs == separator
    places = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    begun = torch.where(begins, places, 0).cummax(1).values
    return {"document_ids": begins.cumsum(1), "position_ids": places - begun}


def _stack(rows: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    both = torch.from_numpy(np.stack(rows).astype(np.int64))
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()
