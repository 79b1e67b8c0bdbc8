"""RMSNorm, optionally fused with the preceding residual addition.

    y    = rms_norm(x, weight, eps)                     # [..., H]
    y, h = add_rms_norm(x, residual, weight, eps)       # h = x + residual is the new residual stream

Formula (Zhang and Sennrich 2019, arXiv:1910.07467), for each row, computed in float32 for any dtype:

    h    = x + residual
    rstd = 1 / sqrt(mean(h^2) + eps)
    y    = h * rstd * weight

    dh   = dresidual + rstd * (g - n * mean(g * n))      with g = dy * weight, n = h * rstd
    dw   = sum over rows of dy * n

dresidual is the gradient that arrives for the output h. The gradients of the inputs x and residual are both dh. Shapes:
x, residual, y, h [..., H]; weight [H]; H at most 16384. y has x's dtype unless `dtype` is given. h has the wider dtype
of x and residual. The weight gradient is summed in float32 over fixed groups of rows, then over the groups. No atomics
are used, so the result has the same bits every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .blocks import row_tile

GROUPS = 256  # maximum number of partial sums of the weight gradient: about two programs per multiprocessor
FUSED_WIDTH = 8192  # wider rows take two passes, because both gradients do not fit into the registers


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5, *, dtype: torch.dtype | None = None) -> Tensor:
    """y [..., H] with dtype `dtype`, default x's. Raises ValueError if H is above 16384."""
    return _RMSNorm.apply(x, weight, eps, None, dtype or x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-5, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """(y, h) [..., H] with h = x + residual. y has dtype `dtype`, default x's. Raises ValueError if H is above
    16384."""
    return _RMSNorm.apply(x, weight, eps, residual, dtype or x.dtype)


def rms_norm_keeping(
    x: Tensor, weight: Tensor, eps: float = 1e-5, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Returns (y, x) [..., H]: the norm, and x itself as the residual stream. Backward adds the gradients that arrive
    through both, and rounds the sum once, like `add_rms_norm`. So a layer's gradients have the same bits whether it is
    the first of its stage or not."""
    return _RMSNorm.apply(x, weight, eps, None, dtype or x.dtype, True)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float = 1e-5, *, dtype: torch.dtype | None = None) -> Tensor:
    """`rms_norm` in plain torch, differentiable."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(dtype or x.dtype)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-5, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` in plain torch, differentiable."""
    h = x + residual
    return rms_norm_reference(h, weight, eps, dtype=dtype or x.dtype), h


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, residual, dtype, keeps=False):
        y, h, rstd = _forward(x, weight, eps, residual, dtype)
        ctx.save_for_backward(h, rstd)
        ctx.weight = weight  # a saved weight would be a detached copy under activation checkpointing
        ctx.x_dtype, ctx.residual_dtype = x.dtype, None if residual is None else residual.dtype
        ctx.set_materialize_grads(False)
        if residual is not None:
            return y, h
        return (y, x.view_as(x)) if keeps else y

    @staticmethod
    def backward(ctx, dy, dh=None):
        h, rstd = ctx.saved_tensors
        if dy is None:  # y went unused: only the residual stream carries a gradient
            return dh.to(ctx.x_dtype), None, None, None if ctx.residual_dtype is None else dh, None, None
        wanted = ctx.needs_input_grad[1]
        dx, dresidual, partial = _backward(dy, h, ctx.weight, rstd, dh, ctx.x_dtype, ctx.residual_dtype, wanted)
        dw = None if partial is None else partial.sum(0).to(ctx.weight.dtype)
        return dx, dw, None, dresidual, None, None


def _forward(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, dtype: torch.dtype):
    """Returns (y, h, rstd). h is x itself if there is no residual."""
    x, width = x.contiguous(), x.shape[-1]
    rows = x.numel() // width
    y = torch.empty_like(x, dtype=dtype)
    h = x if residual is None else torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual.dtype))
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    block, tile, warps = row_tile(width)
    _forward_kernel[(triton.cdiv(rows, tile),)](
        x, None if residual is None else residual.contiguous(), weight, y, h, rstd, rows, width, eps,
        ROWS=tile, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return y, h, rstd


def _backward(dy, h, weight, rstd, dh, x_dtype, residual_dtype, want_weight: bool):
    """Returns (dx, gradient of the input residual, partial weight gradients), with None for results that are not
    needed. If `weight` is None, computes only the partial weight gradients."""
    width, rows = h.shape[-1], rstd.numel()
    if weight is not None and want_weight and width > FUSED_WIDTH:
        dx, dresidual, _ = _backward(dy, h, weight, rstd, dh, x_dtype, residual_dtype, False)
        return dx, dresidual, _backward(dy, h, None, rstd, None, None, None, True)[2]
    block, tile, warps = row_tile(width)
    tiles = triton.cdiv(rows, tile)
    tiles_a_group = triton.cdiv(tiles, GROUPS) if want_weight else 1
    groups = triton.cdiv(tiles, tiles_a_group)
    dx = None if weight is None else torch.empty_like(h, dtype=x_dtype)
    dresidual = dx if residual_dtype in (None, x_dtype) else torch.empty_like(h, dtype=residual_dtype)
    partial = torch.empty(groups, width, dtype=torch.float32, device=h.device) if want_weight else None
    _backward_kernel[(groups,)](
        dy.contiguous(), h, weight, rstd, None if dh is None else dh.contiguous(),
        dx, None if dresidual is dx else dresidual, partial, rows, width, tiles_a_group,
        ROWS=tile, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return dx, None if residual_dtype is None else dresidual, partial


@triton.jit
def _forward_kernel(x, residual, weight, y, h, rstd, rows, width, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        kept = value.to(h.dtype.element_ty)
        tl.store(h + at, kept, mask=mask)
        value = kept.to(tl.float32)  # backward has only the rounded h, so forward must use it too
    scale = 1.0 / tl.sqrt_rn(tl.sum(value * value, axis=1) / width + eps)
    tl.store(rstd + row, scale, mask=row < rows)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(y + at, (value * scale[:, None] * w[None, :]).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dy, h, weight, rstd, dh, dx, dresidual, partial, rows, width, tiles, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    group = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    if weight is not None:
        w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(tiles, num_stages=2):  # num_stages=2 prefetches the next tile
        row = (group * tiles + tile) * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & inside[None, :]
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        scale = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        g = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
        n = tl.load(h + at, mask=mask, other=0.0).to(tl.float32) * scale
        if partial is not None:
            total += g * n
        if weight is not None:
            g *= w
            grad = scale * (g - n * (tl.sum(g * n, axis=1) / width)[:, None])
            if dh is not None:
                grad += tl.load(dh + at, mask=mask, other=0.0).to(tl.float32)
            tl.store(dx + at, grad.to(dx.dtype.element_ty), mask=mask)
            if dresidual is not None:
                tl.store(dresidual + at, grad.to(dresidual.dtype.element_ty), mask=mask)
    if partial is not None:
        tl.store(partial + group * width + column, tl.sum(total, axis=0), mask=inside)
