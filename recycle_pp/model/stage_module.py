"""The interface of one stage of a trainable model. `Stage` calls it.

    module = transformer.part(settings, stage, device)         # the project's own Transformer: fused kernels
    module = general.part(settings, stage, device, run_dir)    # any nn.Module, any Hugging Face decoder
    leaves = module.bind(masters, views, sink)                 # makes the views the module's parameters
    module.relayout([2, 3, 4]); module.bind(None, views, sink)  # changes the module's layers
    module.relayout([-1, 0, 1], stage=0); ...                   # becomes another stage
    outputs = module(batch, boundary, key)                     # the forward; autograd and the sink do the backward

A stage module only computes. It does not communicate or sum gradients over workers, and it holds only the parameters of
its own layers. Its forward is a pure function of (parameters, batch, boundary, key), so any worker gets the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor, nn

from recycle_pp.data.batch import IGNORED, Batch
from recycle_pp.numerics.operations import Operations
from recycle_pp.numerics.weight_grad_store import WeightGradStore

__all__ = ["IGNORED", "Batch", "Boundary", "Key", "StageModule"]

Key = tuple[int, int, int]  # seed, step, g: the key of dropout


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


class StageModule(Protocol):
    """One stage of a model.

    ops        kernels for sums and updates, see `numerics.operations`
    shapes     full-model name -> shape of every parameter that this stage trains, in the order of use
    frozen     full-model name -> shape of every other parameter of this stage. The module reads them from model.path
               in `bind`. They have no gradient and no optimizer state, and are not saved
    origin     digest of model.path if the model has frozen parameters, else ""
    layers     parameter -> the number of its layer, ascending. With L layers, parameters before the first layer have
               number -1, and those after the last layer L. A parameter that several layers use counts as a layer of its
               own, with a number above L
    takes      inputs of the forward from the previous stage; empty at the first stage
    gives      outputs of the forward for the next stage; empty at the last stage, where the forward returns the loss
    parts      parameter -> number of addends of its gradient in one micro-batch, if this number is not 1
    shared     parameter that other stages also hold -> all stages that hold it; its gradient is the sum over them
    deferred   parameters whose gradients wait for the op W; the op I adds all others
    reads      whether the forward uses the batch
    all_names  the trained parameters of the whole model
    depth      L, the number of layers between which the model can be cut; only these can move to other stages
    stays      the reason why no layer can move to another stage, one sentence for the user; None: all L layers can move
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
        parameters. `masters` and `views` may be the same. Reads frozen parameters that the stage did not have before.
        Returns name -> parameter. The sink gets gradients by the index of the parameter in `shapes`.

        masters: None after `relayout`, because the views already have their values"""
        ...

    def shapes_of(self, layer: int) -> Mapping[str, Sequence[int]]:
        """Full-model name -> shape of every parameter of a layer of any stage, in the order of use."""
        ...

    def relayout(self, layers: Sequence[int], stage: int | None = None) -> None:
        """Changes the layers of the stage, the values of `layers`, and everything that depends on them. Call `bind`
        afterwards.

        layers: all layers of the stage
        stage: the stage that this module becomes, including its embedding or head; None: it remains the same stage. If
            `stays` is not None, `stage` is required"""
        ...

    def __call__(self, batch: Batch | None, boundary: Sequence[Tensor], key: Key | None) -> Sequence[Tensor]:
        """The forward.

        boundary  tensors as in `takes`
        key       key of dropout; None disables all randomness (validation)

        Returns tensors as in `gives`. At the last stage, returns [loss]. The loss is a scalar: the mean over the
        counted labels, weighted so that the mean over the micro-batches is the mean of the step."""
        ...
