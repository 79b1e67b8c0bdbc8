"""Detects a loss that shifts the labels a second time and would train each position on the token after the next.

    check = LabelShift(name, vocabulary, loss_of)        # on the last stage, for users' modules
    check.watch(leaves, batch, boundary)     # in the forward; leaves: the arguments of the last layer

`batch.labels` are already shifted. A loss that shifts them again ignores the output at the last position, so the
gradient of the last layer's input is exactly zero at this position. The first backward checks this gradient. If it is
zero, the loss is computed twice, with different labels at the first position. A loss that shifts the labels again also
ignores this difference. A loss that only omits the last position changes with these labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from recycle_pp.config.mistakes import UserMistake
from recycle_pp.model.stage_module import IGNORED, Batch

# (batch, outputs of the previous stage) -> the loss, without randomness
LossOf = Callable[[Batch, Sequence[Tensor]], Tensor]


class LabelShift:
    """The check of one model.

    name        name of the model, for the message
    vocabulary  number of token ids
    """

    def __init__(self, name: str, vocabulary: int, loss_of: LossOf) -> None:
        self._name, self._vocabulary, self._loss_of = name, vocabulary, loss_of
        self._decided = False

    def watch(self, leaves: Sequence[Any], batch: Batch, boundary: Sequence[Tensor]) -> None:
        """Makes the backward check the gradient of the first tensor in `leaves` that has a row per token.

        Does nothing if an earlier check was conclusive, or if this batch does not allow a conclusion."""
        b, T = batch.labels.shape
        if self._decided or T < 3 or bool((batch.labels[:, [0, -1]] == IGNORED).any()):
            return
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.requires_grad and (by := _positions(leaf, b, T)) is not None:
                leaf.register_hook(lambda grad: self._check(by(grad), batch, boundary))
                return
        self._decided = True  # no tensor has a row per token, so the check is not possible

    def _check(self, grad: Tensor, batch: Batch, boundary: Sequence[Tensor]) -> None:
        """Decides whether the loss shifts the labels again. Raises UserMistake if it does.

        grad: gradient of the watched tensor, (b, T, ...)
        """
        if self._decided or not bool(grad[:, :-1].any()):
            return
        self._decided = True
        if bool(grad[:, -1].any()):
            return
        labels = batch.labels.clone()
        labels[:, 0] = (labels[:, 0] + 1) % self._vocabulary
        with torch.no_grad():
            losses = [self._loss_of(of, boundary) for of in (batch, replace(batch, labels=labels))]
        if torch.equal(*losses):
            raise UserMistake(
                f"{self._name}: its forward or loss shifts the labels once more, so it would learn the token after the "
                "next; labels are already shifted, so compare logits[:, t] with labels[:, t]"
            )


def _positions(tensor: Tensor, b: int, T: int) -> Callable[[Tensor], Tensor] | None:
    """A function that reshapes a tensor of this shape to (b, T, ...); None if it does not have a row per token."""
    if tensor.shape[:2] == (b, T):
        return lambda of: of
    if tensor.shape[:1] == (b * T,):
        return lambda of: of.unflatten(0, (b, T))
    if tensor.shape[:2] == (T, b):
        return lambda of: of.transpose(0, 1)
    return None
