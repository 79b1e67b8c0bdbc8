"""The interface of one stage of a trainable model. `Stage` calls it.

    module = transformer.part(settings, stage, device)         # the project's own Transformer: fused kernels
    module = general.part(settings, stage, device, run_dir)    # any nn.Module, any Hugging Face decoder
    leaves = module.bind(masters, views, sink)                 # from now on, its parameters are the views
    module.relayout([2, 3, 4]); module.bind(None, views, sink)  # changes its layers
    outputs = module(batch, boundary, key)                     # the forward; autograd and the sink do the backward

A stage module only computes. It does not communicate or sum gradients over workers, and it holds parameters of its own
layers only. Its forward is a pure function of (parameters, batch, boundary, key), so any worker gets the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Protocol

import torch
from torch import Tensor, nn

from recycle_pp.config.settings import Settings
from recycle_pp.data.batches import documents
from recycle_pp.numerics.operations import Operations
from recycle_pp.numerics.weight_grad_store import WeightGradStore

Key = tuple[int, int, int]  # seed, step, g: the key of dropout
IGNORED = -100  # label without a loss


@dataclass(frozen=True)
class Boundary:
    """A tensor from one stage to the next. Its gradient is sent back if it is `differentiable`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool = True

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Batch:
    """A micro-batch. Every stage may read it.

    inputs  (b, T) int64
    labels  (b, T) int64; labels[i, t] is the target after inputs[i, t] (already shifted); `IGNORED` has no loss
    items   mean number of counted labels per micro-batch of the step; None: the number in this micro-batch. If each
            micro-batch divides its sum of losses by `items`, the mean over the micro-batches is the mean over the
            step's counted labels
    more    further arguments of the model's forward (attention_mask, position_ids), each (b, ...); with
            data.document_mask the tensors of `data.batches.documents`
    """

    inputs: Tensor
    labels: Tensor
    items: float | None = None
    more: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def blank(cls, settings: Settings, device: torch.device | None = None) -> Batch:
        """Zeros of the run's shapes. Each sample is one document."""
        shape = settings.parallel.microbatch_size, settings.model.sequence
        tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        return cls(tokens, tokens, more=documents(tokens, separator=-1) if settings.data.document_mask else {})

    def to(self, device: torch.device) -> Batch:
        more = {name: tensor.to(device) for name, tensor in self.more.items()}
        return replace(self, inputs=self.inputs.to(device), labels=self.labels.to(device), more=more)

    def share_of(self, loss: Tensor) -> Tensor:
        """Converts the mean loss over this micro-batch's labels to its share of the step's mean. Without ignored labels
        both are bit-identical."""
        if self.items is None:
            return loss
        counted = int((self.labels != IGNORED).sum())
        if counted == self.items:
            return loss
        return loss * (counted / self.items) if counted else loss.nan_to_num(0.0) * 0.0


class StageModule(Protocol):
    """One stage of a model.

    ops        kernels for sums and updates, see `numerics.operations`
    shapes     full-model name -> shape of every parameter that this stage trains, in the order of use
    frozen     full-model name -> shape of every other parameter of this stage. The module reads them from model.path
               in `bind`. They have no gradient and no optimizer state, and are not saved
    origin     digest of model.path if the model has frozen parameters, else ""
    layers     parameter -> the number of its layer, ascending; -1: before the first layer; L, the number of layers:
               after the last layer; above L: each parameter that several layers use is a layer of its own
    takes      inputs of the forward from the previous stage; empty at the first stage
    gives      outputs of the forward for the next stage; empty at the last stage, where the forward returns the loss
    parts      parameter -> number of addends of its gradient in one micro-batch, if this number is not 1
    shared     parameter that other stages also hold -> all stages that hold it; its gradient is the sum over them
    deferred   parameters whose gradients wait for the op W; the op I adds all others
    reads      whether the forward uses the batch
    all_names  the trained parameters of the whole model
    depth      L, the number of layers that a model is cut between; these can move to other stages
    stays      why no layer can move to another stage, one sentence for the user; None: all of them can
    recompute  whether layers keep only their input and run again in the backward. May change between two forwards.
               Does not change any bit of the results
    """

    ops: Operations
    shapes: Mapping[str, Sequence[int]]
    frozen: Mapping[str, Sequence[int]]
    origin: str
    layers: Mapping[str, int]
    takes: list[Boundary]
    gives: list[Boundary]
    parts: Mapping[str, int]
    shared: Mapping[str, Sequence[int]]
    deferred: frozenset[str]
    reads: bool
    depth: int
    stays: str | None
    recompute: bool

    @property
    def all_names(self) -> Collection[str]: ...

    def bind(
        self, masters: Mapping[str, Tensor] | None, views: Mapping[str, Tensor], sink: WeightGradStore
    ) -> Mapping[str, nn.Parameter]:
        """Writes the initial values into `masters` (by name, float32) and, rounded, into `views`, which become the
        parameters. Both may be the same tensors. Reads frozen parameters that the stage did not have before. The sink
        gets gradients by the index of the parameter in `shapes`.

        masters: None after `relayout`, when the views have their values already"""
        ...

    def shapes_of(self, layer: int) -> Mapping[str, Sequence[int]]:
        """Full-model name -> shape of every parameter of a layer from 0 to L - 1, of any stage, in the order of use."""
        ...

    def relayout(self, layers: Sequence[int]) -> None:
        """Changes the layers of the stage, the values of `layers`, and everything that depends on them. `takes`,
        `gives` and `shared` stay the same. Requires that `stays` is None. To be followed by `bind`."""
        ...

    def __call__(self, batch: Batch | None, boundary: Sequence[Tensor], key: Key | None) -> Sequence[Tensor]:
        """The forward.

        boundary: tensors as in `takes`. key: None disables all randomness (validation).

        Returns tensors as in `gives`. At the last stage returns the loss, a scalar: the mean over the counted labels,
        weighted so that the mean over the micro-batches is the mean of the step."""
        ...
