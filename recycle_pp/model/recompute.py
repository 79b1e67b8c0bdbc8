"""Activation checkpointing: keep a layer's input, run the layer again in backward (Chen et al. 2016, arXiv:1604.06174).

    y = recomputed(layer, x, *arguments)        # layer: a function of x that is deterministic given its arguments

`torch.utils.checkpoint` does the same and more, but imports torch's compiler, which takes a second in each worker.
No random state is saved, because dropout is keyed and the second run draws the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def recomputed(function: Callable[..., Tensor], x: Tensor, *arguments: Any) -> Tensor:
    """The result of function(x, *arguments). Only x is kept until the backward. Gradients flow to x and to the
    parameters of the function's own layers."""
    return _Recomputed.apply(x, function, arguments)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[..., Tensor], arguments: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.function, ctx.arguments = function, arguments
        kind = x.device.type
        ctx.autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        return function(x, *arguments)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None]:  # type: ignore[override]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), torch.autocast(*ctx.autocast):
            y = ctx.function(x, *ctx.arguments)
        torch.autograd.backward(y, dy)
        return x.grad, None, None
