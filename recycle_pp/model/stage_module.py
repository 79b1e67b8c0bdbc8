"""What a model must offer to be trained: one stage of it, as `Stage` drives it.

    module = transformer.part(settings, stage, device)         # the project's own Transformer: fused kernels
    module = general.part(settings, stage, device, run_dir)    # any nn.Module, any decoder of transformers
    leaves = module.bind(masters, views, sink)                 # its parameters now live in these tensors
    outputs = module(batch, boundary, key)                     # F; autograd and the sink do the rest

A stage module computes and nothing else: it sends nothing, sums nothing, and holds the parameters of its own layers
only. Its forward is a pure function of (parameters, batch, boundary, key): any worker gets the same bits.
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

Key = tuple[int, int, int]  # seed, step, g: what dropout is drawn from
IGNORED = -100  # a label that does not count


@dataclass(frozen=True)
class Boundary:
    """A tensor that one stage gives the next. Its gradient comes back if it is `differentiable`."""

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
    """A micro-batch, as every stage may look at it.

    inputs, labels: (b, T) int64; labels[i, t] is what the model should say after inputs[i, t] (they are shifted
    already), and `IGNORED` does not count. items: how many labels of the step count, divided by the number of its
    micro-batches: a sum of losses divided by it, averaged over the micro-batches, is the mean over the step's tokens;
    None: as many as here. more: further arguments of the model's forward (attention_mask, position_ids), (b, ...) each;
    with data.document_mask what `data.batches.documents` gives.
    """

    inputs: Tensor
    labels: Tensor
    items: float | None = None
    more: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def blank(cls, settings: Settings, device: torch.device | None = None) -> Batch:
        """Zeros of the run's shapes, each sample one document."""
        shape = settings.parallel.microbatch_size, settings.model.sequence
        tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        return cls(tokens, tokens, more=documents(tokens, separator=-1) if settings.data.document_mask else {})

    def to(self, device: torch.device) -> Batch:
        more = {name: tensor.to(device) for name, tensor in self.more.items()}
        return replace(self, inputs=self.inputs.to(device), labels=self.labels.to(device), more=more)

    def share_of(self, loss: Tensor) -> Tensor:
        """The mean loss over this micro-batch's labels -> its share of the step's mean. Without ignored labels they are
        one and the same, in every bit."""
        if self.items is None:
            return loss
        counted = int((self.labels != IGNORED).sum())
        if counted == self.items:
            return loss
        return loss * (counted / self.items) if counted else loss.nan_to_num(0.0) * 0.0


class StageModule(Protocol):
    """
    ops      what computes sums and updates, see `numerics.operations`
    shapes   full-model name -> shape of every parameter that this stage holds, in the order of use
    takes    what F takes in from the stage before; empty at the first stage
    gives    what F gives to the next one; empty at the last, whose F gives the loss
    parts    how many addends a micro-batch's gradient of a parameter consists of, where it is not one
    shared   parameters that other stages hold as well -> all stages that do; the gradient is the sum over them
    deferred the parameters whose gradients wait for W; all others get theirs in I
    reads    whether forward looks at the batch
    all_names  the parameters of the whole model
    recompute  whether layers keep their input alone, and run again in the backward; may be set between two F. It
             changes no bit
    """

    ops: Operations
    shapes: Mapping[str, Sequence[int]]
    takes: list[Boundary]
    gives: list[Boundary]
    parts: Mapping[str, int]
    shared: Mapping[str, Sequence[int]]
    deferred: frozenset[str]
    reads: bool
    recompute: bool

    @property
    def all_names(self) -> Collection[str]: ...

    def bind(
        self, masters: Mapping[str, Tensor], views: Mapping[str, Tensor], sink: WeightGradStore
    ) -> Mapping[str, nn.Parameter]:
        """Writes the initial values into `masters` (by name, float32) and, rounded, into `views`, which become the
        parameters; both may be the same. Gradients go to the sink, the gradient of parameter k of `shapes` as that of
        tensor k. Once."""
        ...

    def __call__(self, batch: Batch | None, boundary: Sequence[Tensor], key: Key | None) -> Sequence[Tensor]:
        """boundary: as `takes` says. Returns what `gives` says, at the last stage the loss, a scalar: the mean over the
        labels that count, weighted so that the mean over the micro-batches is that of the step. key: None switches
        everything random off (validation)."""
        ...
