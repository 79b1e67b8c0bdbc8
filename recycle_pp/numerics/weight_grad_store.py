"""Layers with deferred weight gradients: backward returns the input's gradient, and a sink gets the weight's gradient.

    sink = WeightGradStore(); sink.gradients = gradients   # recycle_pp.numerics.gradients.Gradients
    y = linear(x, weight, sink, index)      # autograd sees an operation on x alone
    sink.queue = []                         # op I (for the input): backward queues (dy, x) of every layer
    y.backward(dy)
    sink.flush(queue)                       # op W (for the weights): adds dy^T x to the accumulators
    sink.queue = None                       # op B (both at once): backward adds dy^T x itself

Splitting the backward pass is the zero-bubble idea (Qi et al. 2023, arXiv:2401.10241). `W` and `B` compute a weight
gradient by the same call on the same operands, so `I` followed by `W` gives the same bits as `B`. With `sink=None` the
layers are ordinary autograd layers, as in the plain trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


class Accumulators(Protocol):
    """The methods of `Gradients` that a sink calls."""

    def add(self, index: int, grad: Tensor) -> None: ...
    def add_product(self, index: int, dy: Tensor, x: Tensor, parts: int = 1) -> None: ...
    def add_sum(self, index: int, dy: Tensor) -> None: ...
    def add_rows(self, index: int, rows: Tensor, dy: Tensor) -> None: ...


Queue = list[tuple[Callable[..., None], int, tuple[Tensor, ...]]]


class WeightGradStore:
    """Receives the weight gradients of one stage. Queues them if there is a queue, else accumulates them at once."""

    gradients: Accumulators  # set by the stage after its layers exist

    def __init__(self) -> None:
        self.queue: Queue | None = None

    def put(self, add: Callable[..., None], index: int, *operands: Tensor) -> None:
        if self.queue is None:
            add(index, *operands)
        else:
            self.queue.append((add, index, operands))

    @staticmethod
    @torch.no_grad()
    def flush(queue: Queue) -> None:
        """Computes the queued gradients, last layer first. Frees each operand after its use."""
        queue.reverse()
        while queue:
            add, index, operands = queue.pop()
            add(index, *operands)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sink: WeightGradStore, index: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.sink, ctx.index = weight, sink, index
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        dx = dy.mm(ctx.weight) if ctx.needs_input_grad[0] else None
        ctx.sink.put(ctx.sink.gradients.add_product, ctx.index, dy, x)
        return dx, None, None, None


class _Norm(torch.autograd.Function):
    """Passes a norm's weight through. The weight's gradient is a by-product of `I` and goes to the sink."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, sink: WeightGradStore, index: int) -> Tensor:
        ctx.sink, ctx.index = sink, index
        return weight.view_as(weight) if weight.dtype == torch.float32 else weight.float()

    @staticmethod
    def backward(ctx: Any, dweight: Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        ctx.sink.put(ctx.sink.gradients.add, ctx.index, dweight)
        return None, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, sink: WeightGradStore, index: int) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.sink, ctx.index = sink, index
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, None, None]:  # type: ignore[override]
        (tokens,) = ctx.saved_tensors
        ctx.sink.put(ctx.sink.gradients.add_rows, ctx.index, tokens, dy)
        return None, None, None, None


class _Bias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, sink: WeightGradStore, index: int) -> Tensor:
        ctx.sink, ctx.index = sink, index
        return y + bias

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        ctx.sink.put(ctx.sink.gradients.add_sum, ctx.index, dy)
        return dy, None, None, None


def linear(x: Tensor, weight: Tensor, sink: WeightGradStore | None, index: int) -> Tensor:
    """x (N, K), weight (O, K) -> (N, O). x and weight have the same dtype."""
    return F.linear(x, weight) if sink is None else _Linear.apply(x, weight, sink, index)


def bias(y: Tensor, bias: Tensor, sink: WeightGradStore | None, index: int) -> Tensor:
    """y (N, O) + bias (O,). Both have the same dtype."""
    return y + bias if sink is None else _Bias.apply(y, bias, sink, index)


def norm_weight(weight: Tensor, sink: WeightGradStore | None, index: int) -> Tensor:
    """The weight (H,) in float32, for use in an operation. Its gradient goes to the sink."""
    return weight if sink is None else _Norm.apply(weight, sink, index)


def embedding(tokens: Tensor, weight: Tensor, sink: WeightGradStore | None, index: int) -> Tensor:
    """tokens (N,) int64, weight (V, H) -> (N, H)."""
    return F.embedding(tokens, weight) if sink is None else _Embedding.apply(tokens, weight, sink, index)
