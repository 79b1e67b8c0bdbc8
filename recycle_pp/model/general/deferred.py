"""Splits the backward of unmodified `nn.Linear` and GPT-2 `Conv1D` modules into the ops I and W.

    deferred = defer(model, {"blocks.0.up.weight": 3, ...}, sink)   # names of parameters whose gradients now wait for W

Applies to exactly these two classes, with plain parameters. The class of such a module is replaced by a class whose
backward returns the input's gradient and passes (dy, x) to the sink. Results are bit-identical, even with autocast and
recomputation. The parameters of all other modules (norms, embeddings, convolutions, experts, subclasses of Linear) get
their gradients from autograd, in I.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recycle_pp.numerics.weight_grad_store import WeightGradStore


def defer(model: nn.Module, index: Mapping[str, int], sink: WeightGradStore) -> set[str]:
    """Replaces the classes of modules whose parameters this stage trains. Returns the names of the parameters whose
    gradients then wait for W. Modules with a frozen parameter keep their class. May be called again when the stage has
    other layers.

    index: full name of each parameter that this stage trains -> index of its tensor in the sink"""
    deferred = set()
    for name, module in model.named_modules():
        kind = _kind(module)
        of = {p: index[f"{name}.{p}"] for p in module._parameters if f"{name}.{p}" in index}
        if kind is None or len(of) < sum(p is not None for p in module._parameters.values()):
            continue  # the class stays; autograd computes no gradients for frozen parameters or those of other stages
        module.__class__ = kind
        module._sink, module._index = sink, of  # type: ignore[assignment]
        deferred |= {f"{name}.{p}" for p in of}
    return deferred


class DeferredLinear(nn.Linear):
    _sink: WeightGradStore
    _index: dict[str, int]

    def forward(self, x: Tensor) -> Tensor:
        return _Deferred.apply(x, self.weight, self.bias, self, False)


def _deferred_conv1d(conv1d: type) -> type:
    class DeferredConv1D(conv1d):  # type: ignore[misc,valid-type]
        def forward(self, x: Tensor) -> Tensor:
            return _Deferred.apply(x, self.weight, self.bias, self, True)

    return DeferredConv1D


_conv1d: dict[type, type] = {}


def _kind(module: nn.Module) -> type | None:
    """The class that replaces the module's class; None if autograd must compute its weight gradients."""
    if isinstance(module, DeferredLinear) or type(module) in _conv1d.values():
        return type(module)
    if set(module._parameters) != {"weight", "bias"} or "forward" in module.__dict__:
        return None
    if type(module) is nn.Linear:
        return DeferredLinear
    known = sys.modules.get("transformers.pytorch_utils")
    if known is not None and type(module) is known.Conv1D:
        return _conv1d.setdefault(known.Conv1D, _deferred_conv1d(known.Conv1D))
    return None


class _Deferred(torch.autograd.Function):
    """y = x w^T + b (transposed: x w + b), with the same operations as the module."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, module: Any, transposed: bool) -> Tensor:
        kind = x.device.type
        ctx.dtype, ctx.module, ctx.transposed, ctx.biased = x.dtype, module, transposed, bias is not None
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        ctx.save_for_backward(x)
        ctx.weight = weight  # not saved, because with recomputation `saved_tensors` would contain another tensor
        if not transposed:
            return F.linear(x, weight, bias)
        return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], -1)  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        sink, index = ctx.module._sink, ctx.module._index
        rows, dy = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        dx = None
        if ctx.needs_input_grad[0]:
            dx = dy.mm(ctx.weight.t() if ctx.transposed else ctx.weight).view(x.shape).to(ctx.dtype)
        operands = (rows, dy) if ctx.transposed else (dy, rows)
        sink.put(sink.gradients.add_product, index["weight"], *operands)
        if ctx.biased:
            sink.put(sink.gradients.add_sum, index["bias"], dy)
        return dx, None, None, None, None
