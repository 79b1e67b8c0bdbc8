"""Checks that the results of one document in a sample do not depend on the previous document.

    refuse_leaks(stage)        # runs two forwards; raises ValueError with a sentence for the user

This check is for users' models, because a model's signature does not show whether it respects `position_ids` or
`document_ids`. Each sample consists of two documents. The first one is changed, and the results of the second must be
bit-identical.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recycle_pp.data.batch import documents

from .stage import Stage
from .stage_module import IGNORED, Batch, Boundary

_SEPARATOR = 0


def refuse_leaks(stage: Stage) -> None:
    """Raises ValueError if the activations or the loss of a document depend on the previous document."""
    settings, unmasked = stage.settings, stage.settings.data.unmasked
    b, T, cut = settings.parallel.microbatch_size, settings.model.sequence, settings.model.sequence // 2
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, settings.model.vocabulary, (3, b, T), generator=random)
    tokens[:, :, cut] = _SEPARATOR
    labels = tokens[2].clone()
    labels[:, :cut] = IGNORED
    seconds = [_values(of) for of in stage.module.takes]
    results = []
    for first in tokens[:2]:
        inputs = torch.cat([first[:, :cut], tokens[2][:, cut:]], 1)
        boundary = [second.clone() for second in seconds]
        for tensor in boundary:
            if tensor.dtype.is_floating_point:
                _by_position(tensor, b, T, unmasked)[:, :cut].normal_(generator=random)
        batch = Batch(inputs, labels, more=documents(inputs == _SEPARATOR))
        results.append(stage.evaluate(batch, [tensor.to(stage.device) for tensor in boundary]))
    for one, other in zip(*results, strict=True):
        if one.dim():  # otherwise it is the loss of the last stage, which covers only the second document
            one, other = (_by_position(tensor, b, T, unmasked)[:, cut:] for tensor in (one, other))
        if not torch.equal(one, other):
            raise ValueError(
                f"{unmasked}: stage {stage.stage} of this model mixes documents; it must use "
                "position_ids, which restart at each document, or document_ids"
            )


def _values(of: Boundary) -> Tensor:
    """A CPU tensor of this shape and dtype with random values, or with zeros if the dtype is an integer."""
    values = of.empty(torch.device("cpu")).zero_()
    return values.normal_(generator=torch.Generator().manual_seed(1)) if of.dtype.is_floating_point else values


def _by_position(tensor: Tensor, b: int, T: int, unmasked: str) -> Tensor:
    """A view (b, T, ...) of a tensor (b, T, ...) or (b T, ...). unmasked: see `Data`."""
    if tensor.shape[:1] == (b * T,):
        return tensor.unflatten(0, (b, T))
    if tensor.shape[:2] != (b, T):
        raise ValueError(
            f"{unmasked}: a tensor between stages of this model, {tuple(tensor.shape)}, has no "
            "dimension for tokens, so it cannot be checked whether documents are kept apart"
        )
    return tensor
