"""The operations of a stage in plain torch, on any device. They are the reference for the kernels.

The layers are autograd Functions with explicit backward passes. On a CPU each pass over memory takes noticeable time,
and an explicit backward can compute the gradients of a norm's weight and of its input in one pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from recycle_pp.config.settings import Optimizer

from . import fixed_point as fixed
from . import weight_grad_store as deferred
from .layout import Layout
from .operations import AdamWState
from .weight_grad_store import WeightGradStore

BLOCK = 1 << 16  # elements that fit a core's cache while they are scaled, rounded and added


def add_rms_norm(x: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    h = x if branch is None else x + branch
    return _RMSNorm.apply(h, weight, eps), h


def rope_qkv(qkv: Tensor, heads: int, kv_heads: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _RopeQKV.apply(qkv, heads, kv_heads, cos, sin)


def swiglu(gate_up: Tensor) -> Tensor:
    return _SwiGLU.apply(gate_up)


def head_loss(x: Tensor, weight: Tensor, targets: Tensor, sink: WeightGradStore | None, index: int) -> Tensor:
    return F.cross_entropy(deferred.linear(x, weight, sink, index).float(), targets)


def add_product(total: Tensor, dy: Tensor, x: Tensor, first: bool) -> None:
    if dy.dtype != torch.float32:
        product = dy.t().mm(x)
        total.copy_(product) if first else total.add_(product)
    elif first:
        torch.mm(dy.t(), x, out=total)
    else:
        total.addmm_(dy.t(), x)


def accumulate(total: Tensor, grad: Tensor, e: Tensor, limit: float, bad: Tensor, first: bool) -> None:
    scales = fixed.powers(e).unsqueeze(1)
    extremes: list[Tensor] = []
    all_sums, all_values = total.view(len(e), -1), grad.reshape(len(e), -1)
    for rows, columns in _pieces(*all_sums.shape):
        sums, values = all_sums[rows, columns], all_values[rows, columns]
        steps = (values.float() * scales[rows]).round_()
        extremes += torch.aminmax(steps)
        if first:
            sums.copy_(steps)
        else:
            sums += steps.to(total.dtype)
    if extremes and not (torch.stack(extremes).abs() < limit).all():  # NaN fails every comparison
        bad[0] += 1
        bad[1] += ~torch.isfinite(all_values).all()


def _pieces(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Tiles of a matrix, each of at most BLOCK elements."""
    height, width = max(1, BLOCK // max(1, columns)), max(1, min(BLOCK, columns))
    for row in range(0, rows, height):
        for column in range(0, columns, width):
            yield slice(row, row + height), slice(column, column + width)


def accumulate_product(total: Tensor, dy: Tensor, x: Tensor, e: Tensor, limit: float, bad: Tensor, first: bool) -> None:
    accumulate(total, dy.t().mm(x), e, limit, bad, first)


def restore(total: Tensor, e: Tensor, out: Tensor) -> None:
    out.copy_(total).view(len(e), -1).mul_(fixed.powers(-e).unsqueeze(1))


def places(layout: Layout, device: torch.device) -> Layout:
    return layout


def squared_norms(flat: Tensor, places: Layout) -> Tensor:
    return torch.stack([squared_norm(unit) for unit in places.units_of(flat)])


def squared_norm(grad: Tensor) -> Tensor:
    """The squared norm of one unit as a float64 scalar. Each row is summed in float32, the rows in float64.

    On a CPU this is 20 times faster than float64 throughout. Rows are short, so it is as precise as the gradient.
    """
    return torch.linalg.vector_norm(grad, dim=-1).double().square_().sum()


def adamw(
    state: AdamWState,
    grad: Tensor,
    places: Layout,
    o: Optimizer,
    *,
    lr: float,
    step: int,
    scale: float,
    undo: AdamWState | None,
) -> None:
    """Calls the kernel of `torch.optim.AdamW(fused=True)` for each tensor, so the bits are the same."""
    for kept, live in zip(undo or (), state, strict=False):
        kept.copy_(live)
    count = torch.full((), step + 1.0, device=grad.device)
    for tensors in zip(*(places.views(flat) for flat in (*state, grad)), strict=True):
        decay = o.weight_decay if tensors[0].dim() >= 2 else 0.0
        for parameter, mean, square, g in [tensors] if state[1].dtype == torch.float32 else _blocks(tensors):
            wide_mean, wide_square = mean.float(), square.float()  # the same tensors, unless they are bfloat16
            torch._fused_adamw_(
                [parameter],
                [g if scale == 1.0 else g * scale],
                [wide_mean],
                [wide_square],
                [],
                [count],
                lr=lr,
                beta1=o.beta1,
                beta2=o.beta2,
                weight_decay=decay,
                eps=o.eps,
                amsgrad=False,
                maximize=False,
            )
            mean.copy_(wide_mean)
            square.copy_(wide_square)
            del wide_mean, wide_square  # frees them before the next block is copied


def _blocks(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """The elements of equally large tensors, BLOCK at a time. Float32 copies of a block stay in a core's cache."""
    return zip(*(tensor.view(-1).split(BLOCK) for tensor in tensors), strict=True)


class _RMSNorm(torch.autograd.Function):
    """y = x / sqrt(mean(x^2) + eps) * w (Zhang and Sennrich 2019, arXiv:1910.07467), in float32; y has x's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
        ctx.save_for_backward(x, scale)
        ctx.weight = weight
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, scale = ctx.saved_tensors
        unit = x.float() * scale
        dy = dy.float()
        product = dy * unit
        dweight = product.sum(0)
        mean = torch.mv(product, ctx.weight).div_(x.shape[-1]).unsqueeze_(-1)
        dx = (dy * ctx.weight).sub_(unit.mul_(mean)).mul_(scale)
        return dx.to(x.dtype), dweight, None


class _RopeQKV(torch.autograd.Function):
    """Rotary positions (Su et al. 2021, arXiv:2104.09864): the pair (i, i + d/2) of a head turns by its angle.

    Splits the packed projection in the same pass. Autograd would instead fill three zeroed gradients of the whole
    projection in the backward, and add them up.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int, kv_heads: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        ctx.cos, ctx.sin = cos.to(qkv.dtype), sin.to(qkv.dtype)
        turned = torch.empty_like(qkv[:, :, : heads + kv_heads], memory_format=torch.contiguous_format)
        _turn(qkv[:, :, : heads + kv_heads], ctx.cos, ctx.sin, turned)
        return turned[:, :, :heads], turned[:, :, heads:], qkv[:, :, heads + kv_heads :]

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        heads, kv_heads = dq.shape[2], dk.shape[2]
        out = dq.new_empty(*dq.shape[:2], heads + 2 * kv_heads, dq.shape[3])
        q, k, v = out.split([heads, kv_heads, kv_heads], dim=2)
        _turn(dq, ctx.cos, -ctx.sin, q)
        _turn(dk, ctx.cos, -ctx.sin, k)
        v.copy_(dv)
        return out, None, None, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up (Shazeer 2020, arXiv:2002.05202) of one matrix that contains both."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        out = torch.empty_like(gate_up)
        dgate, dup = out.chunk(2, -1)
        torch.mul(F.silu(gate), dy, out=dup)
        torch.ops.aten.silu_backward.grad_input(dy * up, gate, grad_input=dgate)
        return out
