"""The reference: one process, the whole model, an ordinary PyTorch training loop. Tests and benches compare with it.

    for loss, norm in train(settings, steps=10):
        print(loss, norm)

No stage, no sink, no schedule: autograd fills `.grad`, `torch.optim.AdamW` steps. With `numerics.reproducible` the sum
over the micro-batches is the fixed point of the exactness contract, here spelled out in its plainest form.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from recycle_pp.config.settings import Settings
from recycle_pp.data.batches import Batches
from recycle_pp.model.transformer import Build, Transformer, depth
from recycle_pp.numerics import fixed_point as fixed
from recycle_pp.numerics.optimizer import clip_scale, learning_rate
from recycle_pp.numerics.torch_operations import squared_norm


def train(
    settings: Settings, steps: int, model: Transformer | None = None, batches: Batches | None = None
) -> Iterator[tuple[float, float]]:
    """Yields (mean loss, gradient norm before clipping) of each step; `model` is trained in place."""
    model = model or whole(settings)
    batches = batches or Batches(settings)
    optimizer = adamw(settings, model)
    parameters = list(model.parameters())
    G = settings.parallel.pipelines * settings.parallel.microbatches
    exponents = [fixed.exponent(fixed.FIRST, G)] * len(parameters)
    for step in range(steps):
        losses = []
        totals = [torch.zeros_like(p, dtype=torch.int64) for p in parameters] if settings.numerics.reproducible else []
        for g in range(G):
            with torch.autocast("cpu", torch.bfloat16, enabled=settings.numerics.precision == "bf16"):
                loss = model(*batches.batch(step, g), key=(settings.run.seed, step, g))
            (loss / G).backward()
            losses.append(loss.item())
            for parameter, total, e in zip(parameters, totals, exponents, strict=False):
                total += (gradient(parameter).double() * 2.0**e).round().long()
                parameter.grad = None
        for parameter, total, e in zip(parameters, totals, exponents, strict=False):
            parameter.grad = total.float() * 2.0**-e
        if totals:
            exponents = [fixed.exponent(gradient(p).abs().max().item(), G) for p in parameters]
        squares = [squared_norm(gradient(parameter)).item() for parameter in parameters]
        norm, scale = clip_scale(squares, settings.optimizer.clip)
        if scale != 1.0:
            for parameter in parameters:
                gradient(parameter).mul_(scale)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings.optimizer, step, settings.run.steps)
        optimizer.step()
        optimizer.zero_grad()
        yield sum(losses) / G, norm


def whole(settings: Settings) -> Transformer:
    """The full model with ordinary autograd layers."""
    build = Build(settings.model, settings.run.seed, torch.device("cpu"))
    return Transformer(build, range(depth(settings.model)))


def adamw(settings: Settings, model: Transformer) -> torch.optim.Optimizer:
    """torch's AdamW, its fused form, with weight decay for matrices only."""
    o, parameters = settings.optimizer, list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": o.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, fused=True)


def gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
