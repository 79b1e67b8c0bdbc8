"""The reference for tests and benches: an ordinary PyTorch training loop that trains the whole model in one process.

    for loss, norm in train(settings, steps=10):
        print(loss, norm)

The loop has no stages, no deferred gradients and no schedule: autograd fills `.grad`, and `torch.optim.AdamW` updates
the parameters. With `numerics.reproducible`, micro-batches are summed in fixed point, with the simplest code that gives
a job's bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from recycle_pp.config.settings import Settings
from recycle_pp.data.batches import Batches
from recycle_pp.model.transformer import Build, Transformer, depth, stream_dtype
from recycle_pp.numerics import fixed_point as fixed
from recycle_pp.numerics.hyperparameters import learning_rate, unit_size
from recycle_pp.numerics.layout import Layout
from recycle_pp.numerics.torch_operations import squared_norm
from recycle_pp.protocol.commit import clip_scale

CPU = torch.device("cpu")


def train(
    settings: Settings,
    steps: int,
    model: Transformer | None = None,
    batches: Batches | None = None,
    masters: Sequence[nn.Parameter] | None = None,
) -> Iterator[tuple[float, float]]:
    """Yields (mean loss, gradient norm before clipping) for each step. Trains `model` and `masters` in place.

    masters: the result of `masters_of`; None: new ones
    """
    model = model or whole(settings)
    batches = batches or Batches(settings)
    parameters = list(model.parameters())
    device = parameters[0].device
    masters = masters or masters_of(settings, parameters)
    optimizer = adamw(settings, masters)
    G = settings.parallel.pipelines * settings.parallel.microbatches
    exponents = [fixed.exponents(torch.tensor(fixed.FIRST), G)] * len(blocks(settings, parameters))
    for step in range(steps):
        losses = []
        totals = [torch.zeros_like(p, dtype=torch.int64) for p in parameters] if settings.numerics.reproducible else []
        for g in range(G):
            with torch.autocast(device.type, torch.bfloat16, enabled=settings.numerics.precision == "bf16-autocast"):
                inputs, targets = batches.batch(step, g)
                of = batches.more(inputs).get("document_ids")
                of = of if of is None else of.to(device)
                loss = model(inputs.to(device), targets.to(device), key=(settings.run.seed, step, g), documents=of)
            (loss / G).backward()
            losses.append(loss.item())
            if totals:
                grads = blocks(settings, [gradient(parameter) for parameter in parameters])
                for grad, total, e in zip(grads, blocks(settings, totals), exponents, strict=True):
                    total += (grad.double() * 2.0 ** e.item()).round().long()
                model.zero_grad()
        if totals:
            for parameter, total in zip(parameters, totals, strict=True):
                parameter.grad = total.float()
        grads = blocks(settings, [gradient(parameter) for parameter in parameters])
        if totals:
            for grad, e in zip(grads, exponents, strict=True):
                grad *= 2.0 ** -e.item()
            exponents = [fixed.exponents(grad.abs().max(), G) for grad in grads]
        norm, scale = clip_scale([squared_norm(grad).item() for grad in grads], settings.optimizer.clip)
        for parameter, master in zip(parameters, masters, strict=True):
            master.grad = gradient(parameter) if scale == 1.0 else gradient(parameter) * scale
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings.optimizer, step, settings.run.steps)
        optimizer.step()
        model.zero_grad()
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                if parameter is not master:
                    parameter.copy_(master.bfloat16())
        yield sum(losses) / G, norm


def whole(settings: Settings, device: torch.device = CPU) -> Transformer:
    """The full model with ordinary autograd layers.

    In bf16 its parameters are float32 tensors with bfloat16 values. So gradients are rounded only by the matrix
    products, not when they are summed."""
    build = Build(settings.model, settings.run.seed, device, stream_dtype(settings))
    return Transformer(build, range(depth(settings.model)))


def masters_of(settings: Settings, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """The tensors that the optimizer updates: the parameters themselves or, in bf16, float32 copies of them. In bf16
    it also rounds the parameters to bfloat16 values."""
    if settings.numerics.precision != "bf16":
        return list(parameters)
    masters = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(parameter.bfloat16())
    return masters


def adamw(settings: Settings, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """torch's fused AdamW, with weight decay only for matrices."""
    o = settings.optimizer
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": o.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, fused=True)


def blocks(settings: Settings, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of the blocks of all tensors, each as a matrix. Each block has its own norm and its own exponent."""
    cut = partial(unit_size, settings.optimizer)
    layouts = ((tensor, Layout({"": tensor.shape}, cut)) for tensor in tensors)
    return [tensor.view(of.rows[0], -1)[block.rows] for tensor, of in layouts for block in of.units]


def gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
