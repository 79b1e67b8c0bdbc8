"""The reference for tests and benches: an ordinary PyTorch training loop that trains the whole model in one process.

    for loss, norm in train(settings, steps=10):
        print(loss, norm)

The loop has no stages, no deferred gradients and no schedule: autograd fills `.grad`, and `torch.optim.AdamW` and
`torch.optim.Muon` update the parameters. With `numerics.reproducible`, the gradients of micro-batches are summed in
fixed point. This code is as simple as possible, but its sums have the same bits as in a job.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from recycle_pp.config.settings import Settings
from recycle_pp.data.batches import Batches
from recycle_pp.model.transformer import Build, Transformer, depth, stream_dtype
from recycle_pp.numerics import fixed_point as fixed
from recycle_pp.numerics.hyperparameters import learning_rate
from recycle_pp.numerics.layout import Layout
from recycle_pp.numerics.torch_operations import squared_norm
from recycle_pp.numerics.update_rules.choice import choice
from recycle_pp.numerics.update_rules.rule import Parameter
from recycle_pp.protocol.ballot import clip_scale

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
    names, parameters = zip(*model.named_parameters(), strict=True)
    device = parameters[0].device
    masters = masters or masters_of(settings, parameters)
    optimizers = optimizers_of(settings, names, masters)
    G = settings.parallel.pipelines * settings.parallel.microbatches
    exponents = [fixed.exponents(torch.tensor(fixed.FIRST), G)] * len(blocks(settings, names, parameters))
    for step in range(steps):
        losses = []
        totals = [torch.zeros_like(p, dtype=torch.int64) for p in parameters] if settings.numerics.reproducible else []
        for g in range(G):
            with torch.autocast(device.type, torch.bfloat16, enabled=settings.numerics.precision == "bf16-autocast"):
                batch = batches.batch(step, g).of_step(batches.items(step)).to(device)
                of, key = batch.more.get("document_ids"), (settings.run.seed, step, g)
                loss = batch.share_of(model(batch.inputs, batch.labels, key=key, documents=of))
            (loss / G).backward()
            losses.append(loss.item())
            if totals:
                grads = blocks(settings, names, [gradient(parameter) for parameter in parameters])
                for grad, total, e in zip(grads, blocks(settings, names, totals), exponents, strict=True):
                    total += (grad.double() * 2.0 ** e.item()).round().long()
                model.zero_grad()
        if totals:
            for parameter, total in zip(parameters, totals, strict=True):
                parameter.grad = total.float()
        grads = blocks(settings, names, [gradient(parameter) for parameter in parameters])
        if totals:
            for grad, e in zip(grads, exponents, strict=True):
                grad *= 2.0 ** -e.item()
            exponents = [fixed.exponents(grad.abs().max(), G) for grad in grads]
        norm, scale = clip_scale([squared_norm(grad).item() for grad in grads], settings.optimizer.clip)
        for parameter, master in zip(parameters, masters, strict=True):
            master.grad = gradient(parameter) if scale == 1.0 else gradient(parameter) * scale
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(settings.optimizer, step, settings.run.steps)
            optimizer.step()
            if settings.optimizer.moments == "bf16":
                round_state(optimizer)
        model.zero_grad()
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                if parameter is not master:
                    parameter.copy_(master.bfloat16())
        yield sum(losses) / G, norm


def whole(settings: Settings, device: torch.device = CPU) -> Transformer:
    """The full model with ordinary autograd layers.

    In bf16 its parameters are float32 tensors with bfloat16 values. Gradients are thus rounded only by the matrix
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


def optimizers_of(
    settings: Settings, names: Sequence[str], parameters: Sequence[nn.Parameter]
) -> list[torch.optim.Optimizer]:
    """torch's AdamW, and with optimizer.name=muon torch's Muon for the matrices inside layers."""
    o = settings.optimizer
    if o.name == "adamw":
        return [adamw(settings, parameters)]
    inside = [name.startswith("layers.") and p.dim() == 2 for name, p in zip(names, parameters, strict=True)]
    matrices = [p for p, of in zip(parameters, inside, strict=True) if of]
    muon = torch.optim.Muon(
        matrices, lr=o.lr, weight_decay=o.weight_decay, momentum=o.muon.momentum, ns_steps=o.muon.iterations,
        adjust_lr_fn="match_rms_adamw" if o.muon.scale == "adamw" else "original",
    )  # fmt: skip
    return [muon, adamw(settings, [p for p, of in zip(parameters, inside, strict=True) if not of])]


def round_state(optimizer: torch.optim.Optimizer) -> None:
    """Rounds the moments to bfloat16 values."""
    for state in optimizer.state.values():
        for name in state.keys() & {"exp_avg", "exp_avg_sq", "momentum_buffer"}:
            state[name].copy_(state[name].bfloat16())


def adamw(settings: Settings, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """torch's fused AdamW, with weight decay only for matrices."""
    o = settings.optimizer
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": o.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, fused=True)


def blocks(settings: Settings, names: Sequence[str], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of the blocks of all tensors, each as a matrix. Each block has its own norm and its own exponent."""
    choose, found = choice(settings.optimizer), []
    for name, tensor in zip(names, tensors, strict=True):
        size = choose(Parameter(name, tuple(tensor.shape), name.startswith("layers."))).unit_size
        of = Layout({name: tensor.shape}, lambda *_, size=size: size)
        found += [tensor.view(of.rows[0], -1)[block.rows] for block in of.units]
    return found


def gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
