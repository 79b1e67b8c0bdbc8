"""Rotary position embedding (RoPE) of queries and keys in one launch.

    cos, sin = rope_table(sequence, head_dim, theta)              # [T, D/2] each, float32
    q, k, v = rope_qkv(qkv, heads, kv_heads, cos, sin)            # qkv [B, T, heads + 2 kv_heads, D], one projection
    x = rope(x, cos, sin)                                         # [B, T, any heads, D]; rotates all heads

Formula (Su et al. 2021, arXiv:2104.09864, in the half-split form of GPT-NeoX and Llama). For position t and pair i,
with angle a = t * theta^(-2i/D) and x = [x1 | x2] the two halves of a head:

    x1' = x1 cos a - x2 sin a
    x2' = x2 cos a + x1 sin a

This is a rotation, so backward is the same kernel with -sin, and forward saves only the table. `rope_qkv` also splits
the packed projection, and its backward packs the gradient again (v is copied). Autograd would instead fill and add
three zeroed gradients of the whole projection. Inputs may have any strides, but are copied if the last one is not 1.
Results are contiguous and have the inputs' dtype. The arithmetic is float32. cos and sin may be [T, D/2] or
[T, 1, D/2].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .blocks import power_of_two


def rope_table(
    sequence: int, head_dim: int, theta: float = 10000.0, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin of every angle, [sequence, head_dim / 2] float32, computed in float64."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
    angle = torch.outer(torch.arange(sequence, dtype=torch.float64, device=device), frequency)
    return angle.cos().float(), angle.sin().float()


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, T, heads, D] rotated by its positions. Row t of the table is for position t."""
    return _Rope.apply(x, cos, sin)


def rope_qkv(qkv: Tensor, heads: int, kv_heads: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(rotated q, rotated k, v) [B, T, heads or kv_heads, D] from a packed [B, T, heads + 2 kv_heads, D]."""
    return _RopeQKV.apply(qkv, [heads, kv_heads, kv_heads], cos, sin)


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rope` in plain torch, differentiable."""
    cos, sin = (table.reshape(-1, 1, x.shape[-1] // 2)[: x.shape[1]] for table in (cos, sin))
    x1, x2 = (x if x.dtype == torch.float64 else x.float()).chunk(2, dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).to(x.dtype)


def rope_qkv_reference(
    qkv: Tensor, heads: int, kv_heads: int, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`rope_qkv` in plain torch, differentiable."""
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=2)
    return rope_reference(q, cos, sin), rope_reference(k, cos, sin), v


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _turn([x], [_empty(x)], cos, sin, back=False)[0]

    @staticmethod
    def backward(ctx, dx):
        cos, sin = ctx.saved_tensors
        return _turn([dx], [_empty(dx)], cos, sin, back=True)[0], None, None


class _RopeQKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, split, cos, sin):
        ctx.save_for_backward(cos, sin)
        ctx.split = split
        parts = qkv.split(split, dim=2)
        return tuple(_turn(parts, [_empty(part) for part in parts], cos, sin, back=False))

    @staticmethod
    def backward(ctx, *grads):
        batch, sequence, _, dim = grads[0].shape
        packed = grads[0].new_empty(batch, sequence, sum(ctx.split), dim)
        cos, sin = ctx.saved_tensors
        _turn(grads, packed.split(ctx.split, dim=2), cos, sin, back=True)
        return packed, None, None, None


def _empty(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _turn(sources, targets, cos: Tensor, sin: Tensor, back: bool):
    """Fill `targets` with the rotated `sources` and return `targets`. There is one tensor, or three for q, k and v, of
    shape [B, T, heads, D] each. v is copied without rotation. The last stride of a target must be 1.

    back: rotate by the negative angles, as backward does"""
    sources = [x if x.stride(-1) == 1 else x.contiguous() for x in sources]
    batch, sequence, _, dim = sources[0].shape
    if len(sources) == 1:
        pairs = [sources[0], targets[0], None, None, None, None]
    else:
        pairs = [x for pair in zip(sources, targets, strict=True) for x in pair]
    strides = [s for x in pairs for s in ((0, 0, 0) if x is None else x.stride()[:3])]
    heads = [1 if x is None else x.shape[2] for x in pairs[::2]]
    _rope_kernel[(batch * sequence,)](
        *pairs, cos, sin, sequence, *strides, HALF=dim // 2, BACK=back,
        Q_HEADS=heads[0], K_HEADS=heads[1], Q_BLOCK=power_of_two(heads[0]), K_BLOCK=power_of_two(heads[1]),
        BLOCK=power_of_two(dim // 2), num_warps=4,
    )  # fmt: skip
    return targets


@triton.jit
def _rope_kernel(
    q, q_out, k, k_out, v, v_out, cos, sin, sequence,
    q_b, q_t, q_h, qo_b, qo_t, qo_h, k_b, k_t, k_h, ko_b, ko_t, ko_h, v_b, v_t, v_h, vo_b, vo_t, vo_h,
    HALF: tl.constexpr, BACK: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
    Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    b, t = token // sequence, token % sequence
    i = tl.arange(0, BLOCK)
    c = tl.load(cos + t * HALF + i, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + t * HALF + i, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    if BACK:
        s = -s
    _turn_heads(q + b * q_b + t * q_t, q_h, q_out + b * qo_b + t * qo_t, qo_h, c, s, i, Q_HEADS, HALF, Q_BLOCK, True)
    if k is not None:
        _turn_heads(
            k + b * k_b + t * k_t, k_h, k_out + b * ko_b + t * ko_t, ko_h, c, s, i, K_HEADS, HALF, K_BLOCK, True
        )
        _turn_heads(
            v + b * v_b + t * v_t, v_h, v_out + b * vo_b + t * vo_t, vo_h, c, s, i, K_HEADS, HALF, K_BLOCK, False
        )


@triton.jit
def _turn_heads(
    x, x_head, out, out_head, c, s, i,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, BLOCK).to(tl.int64)[:, None]  # int64, because heads of [B, heads, T, D] are far apart
    mask = (head < HEADS) & (i < HALF)[None, :]
    source, target = x + head * x_head + i[None, :], out + head * out_head + i[None, :]
    x1 = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    if TURN:
        y1, y2 = x1 * c - x2 * s, x2 * c + x1 * s
    else:
        y1, y2 = x1, x2
    tl.store(target, y1.to(out.dtype.element_ty), mask=mask)
    tl.store(target + HALF, y2.to(out.dtype.element_ty), mask=mask)
