"""A micro-batch, with the tensors that a model's forward and its loss receive.

batch = Batch(inputs, labels)                   # every label has a loss unless it is IGNORED
batch.to(device); batch.share_of(loss)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

IGNORED = -100  # label without a loss


@dataclass(frozen=True)
class Batch:
    """A micro-batch. Every stage may read it.

    inputs  (b, T) int64: b samples of T tokens
    labels  (b, T) int64; labels[i, t] is the token after inputs[i, t] (already shifted); `IGNORED` has no loss.
            With data.build, inputs and labels are the dataset's input_ids and labels, of any shape; (b, 0) if missing
    items   number of labels with a loss, averaged over the micro-batches of the step; None: the number in this
            micro-batch. Each micro-batch divides its sum of losses by `items`, so that the mean over the micro-batches
            is the mean over all labels of the step that have a loss
    more    further arguments of the model's forward, each (b, ...): the tensors of `documents` if `Data.masked`, or the
            dataset's other tensors with data.build
    counted number of labels with a loss in this micro-batch; None if it was not counted
    """

    inputs: Tensor
    labels: Tensor
    items: float | None = None
    more: Mapping[str, Tensor] = field(default_factory=dict)
    counted: int | None = None

    def of_step(self, items: float | None) -> Batch:
        """The micro-batch with `items` and `counted`. Its labels should be on the CPU, because they are counted."""
        if items is None and (not self.labels.numel() or self.labels.is_floating_point()):
            return self
        return replace(self, items=items, counted=int((self.labels != IGNORED).sum()))

    def to(self, device: torch.device) -> Batch:
        more = {name: _moved(tensor, device) for name, tensor in self.more.items()}
        return replace(self, inputs=_moved(self.inputs, device), labels=_moved(self.labels, device), more=more)

    def share_of(self, loss: Tensor) -> Tensor:
        """This micro-batch's share of the step's mean loss.

        loss: the mean over this micro-batch's labels; without ignored labels, it is returned unchanged
        """
        if self.counted == 0:
            return loss.nan_to_num(0.0) * 0.0
        if self.items is None or self.counted is None or self.counted == self.items:
            return loss
        return loss * (self.counted / self.items)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device. On a GPU the caller does not wait; from memory that is not pinned, a copy would wait
    for all work of the stream."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def documents(begins: Tensor) -> dict[str, Tensor]:
    """Tensors that let a model keep attention within each document of a sample, each (b, T) int64.

    document_ids  for each token, the number of its document in the sample
    position_ids  for each token, its position in the document

    begins: (b, T) bool, whether a document begins with this token
    """
    places = torch.arange(begins.shape[1], device=begins.device).expand(begins.shape)
    begun = torch.where(begins, places, 0).cummax(1).values
    return {"document_ids": begins.cumsum(1), "position_ids": places - begun}
