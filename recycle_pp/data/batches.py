"""The tokens of a micro-batch: a pure function of (seed, step, g), the same on every worker.

    batches = Batches(settings)
    inputs, targets = batches.batch(step, g)        # (b, T) int64 each, targets are shifted by one token
    batches.sample_ids(step, g)                     # the numbers of its b windows, for the sample log
    inputs, targets = batches.validation(i)         # from the held-out end of the data, or from data.validation_path
    batches.more(inputs)                            # with data.document_mask: each token's document and position

The training data are cut into windows of T tokens. Sample n of the run (n = (step G + g) b + j) is the n-th window in a
keyed permutation of all windows. Each epoch has another permutation. So within an epoch each window occurs exactly
once, independently of the number of workers and of resumes. With data.weights each source has its own order (`order`).
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
        ignores: whether some labels are -100 and have no loss.
        name: name of the data, for messages.
        fingerprint: digest of the tokens; equal fingerprints mean the same text.
        windows: training samples per epoch.
        validations: number of different validation micro-batches.

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
        """Inputs and targets of micro-batch g of step `step`, each (b, T) int64.

        Like the other methods, raises UserMistake if the data cannot be trained on."""
        return _stack([self._samples.train(window) for window in self.sample_ids(step, g)])

    def sample_ids(self, step: int, g: int) -> list[int]:
        """The windows in micro-batch g of step `step`."""
        return self._samples.ids((step * self._G + g) * self._b, self._b)

    def validation(self, i: int) -> tuple[Tensor, Tensor]:
        """The i-th held-out micro-batch, like `batch`. The micro-batches repeat after `validations`."""
        if not self.validations:
            raise UserMistake(
                f"data.validation_share leaves fewer than {self._b} held-out samples of {self._T} tokens of "
                f"{self.name}; raise it or set run.validate_every=0"
            )
        first = i % self.validations * self._b
        return _stack([self._samples.held_out(window) for window in range(first, first + self._b)])

    def more(self, inputs: Tensor) -> Mapping[str, Tensor]:
        """Further inputs of a model, for inputs (b, T): with data.document_mask the result of `documents`, else {}."""
        return {} if self._samples.separator is None else documents(inputs, self._samples.separator)


def documents(inputs: Tensor, separator: int) -> dict[str, Tensor]:
    """For each token, `document_ids`: the number of its document in the sample, and `position_ids`: its position in the
    document. Both are (b, T) int64.

    A separator belongs to the document that follows: the first token of a document is predicted from the separator
    alone, and the last one predicts the next separator. So no target is lost, and none is predicted from another
    document.
    """
    begins = inputs == separator
    places = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    begun = torch.where(begins, places, 0).cummax(1).values
    return {"document_ids": begins.cumsum(1), "position_ids": places - begun}


def _stack(rows: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    both = torch.from_numpy(np.stack(rows).astype(np.int64))
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()
