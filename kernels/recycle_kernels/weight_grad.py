"""The weight gradient of a linear layer, accumulated in the epilogue of the matrix product.

    weight_grad(buffer, dy, x)                              # buffer [O, K] float32 += dy^T x
    weight_grad(buffer, dy, x, first=True)                  # buffer = dy^T x; the old values are not read
    weight_grad_fixed(q, dy, x, exponents, limit, bad)      # q [O, K] int64 += rint(dy^T x * 2^exponents)

dy [T, O] and x [T, K] are bfloat16, float16 or float32 with adjacent elements in a row. The product is summed in
float32 (float32 operands do not use tf32) and added to the buffer in the epilogue. So the gradient of a micro-batch is
not rounded to bfloat16, and needs no extra write and read. One program computes each tile of the buffer and sums over T
in a fixed order, without atomics or split-K. So the same `Tile` gives the same bits every time. The fixed-point variant
(fixed_point.py) also makes the sum over micro-batches independent of their order.

A different tile sums in a different order. So tiles come from a table, `tile_of(...)`, a pure function of shape, dtype
and architecture. Peers with the same GPU launch the same program without communication or measurements at startup.
`tile=` is for benchmarks that check the table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from .fixed_point import power, raise_flags, to_steps

# Number of rounds in which `weight_grad` and `weight_grad_fixed` add a tile to the buffer, if each thread has at least
# 64 elements of it. With fewer rounds, registers spill, or only one program fits on a multiprocessor.
ROUNDS, ROUNDS_FIXED = 2, 8


class Tile(NamedTuple):
    """The work of one program: an [out, inner] tile of the buffer, with `tokens` rows of dy and x per iteration."""

    out: int
    inner: int
    tokens: int
    group: int = 8  # rows of tiles that run together and share x in the L2 cache
    warps: int = 4
    stages: int = 3  # iterations whose loads overlap


def weight_grad(buffer: Tensor, dy: Tensor, x: Tensor, *, first: bool = False, tile: Tile | None = None) -> None:
    """buffer [O, K] (float32, contiguous) += dy [T, O]^T x [T, K]. first: overwrite instead of add."""
    _launch(buffer, dy, x, None, None, 1.0, first, tile)


def weight_grad_fixed(
    q: Tensor,
    dy: Tensor,
    x: Tensor,
    exponents: Tensor,
    limit: float,
    bad: Tensor,
    *,
    first: bool = False,
    tile: Tile | None = None,
) -> None:
    """q [O, K] (int64 or int32, contiguous) += rint(dy^T x * 2^exponents).

    exponents   int32 [O], or [1] for all rows
    limit, bad  see fixed_point.py
    first       overwrite instead of add"""
    _launch(q, dy, x, bad, exponents, limit, first, tile)


def weight_grad_reference(buffer: Tensor, dy: Tensor, x: Tensor) -> None:
    """`weight_grad` in plain torch."""
    wide = buffer.dtype
    buffer.addmm_(dy.to(wide).T, x.to(wide))


def tile_of(out: int, inner: int, dtype: torch.dtype, arch: int) -> Tile:
    """The tile for a product of shape [out, inner]: the largest one that still gives a tile to each multiprocessor of a
    large GPU (about 130).

    dtype: type of dy and x. arch: compute capability: 80, 90, 100."""
    if dtype == torch.float32:  # no tensor cores, so registers are the limit
        return Tile(64, 64, 16)
    if out * inner < 130 * 128 * 128:
        return Tile(64, 64, 64)
    if out * inner < 130 * 128 * 256 or inner % 16:  # unaligned x needs registers for addresses
        return Tile(128, 128, 64, warps=8)
    if arch < 90:  # operands pass through registers, so 64 tokens do not fit in addition to the product
        return Tile(128, 256, 32, warps=8, stages=4)
    return Tile(128, 256, 64, warps=8)


def _launch(
    buffer: Tensor,
    dy: Tensor,
    x: Tensor,
    bad: Tensor | None,
    exponents: Tensor | None,
    limit: float,
    first: bool,
    tile: Tile | None,
) -> None:
    dy, x = (t if t.stride(1) == 1 else t.contiguous() for t in (dy, x))
    tokens, out = dy.shape
    inner = x.shape[1]
    arch = 0 if x.device.type == "cpu" else driver.active.get_current_target().arch  # CPU: Triton's interpreter
    tile = tile or tile_of(out, inner, x.dtype, arch)
    a_thread = min(64, tile.out * tile.inner // (32 * tile.warps))  # elements per thread, capped at 64 (see `ROUNDS`)
    _kernel[(triton.cdiv(out, tile.out) * triton.cdiv(inner, tile.inner),)](
        buffer, dy, x, bad, tokens, out, inner, dy.stride(0), x.stride(0),
        exponents, 0 if exponents is None or len(exponents) == 1 else 1, limit,
        WHOLE=tokens % tile.tokens == 0, FIRST=first,
        OUT=tile.out, INNER=tile.inner, TOKENS=tile.tokens, GROUP=tile.group,
        PARTS=max(1, a_thread * (ROUNDS if bad is None else ROUNDS_FIXED) // 64),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@triton.jit
def _kernel(
    buffer, dy, x, bad, tokens, out, inner, dy_stride, x_stride, exponents, exponent_stride, limit,
    WHOLE: tl.constexpr, FIRST: tl.constexpr, OUT: tl.constexpr, INNER: tl.constexpr, TOKENS: tl.constexpr,
    GROUP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    pid, columns = tl.program_id(0), tl.cdiv(inner, INNER)
    tile_out, tile_inner = tl.swizzle2d(pid // columns, pid % columns, tl.cdiv(out, OUT), columns, GROUP)
    o, k, t = tile_out * OUT + tl.arange(0, OUT), tile_inner * INNER + tl.arange(0, INNER), tl.arange(0, TOKENS)
    dy_at = dy + t.to(tl.int64)[None, :] * dy_stride + o[:, None]
    x_at = x + t.to(tl.int64)[:, None] * x_stride + k[None, :]
    product = tl.zeros([OUT, INNER], tl.float32)
    for start in range(0, tokens, TOKENS):
        inside = t < tokens if WHOLE else t < tokens - start
        a = tl.load(dy_at, mask=inside[None, :] & (o < out)[:, None], other=0.0)
        b = tl.load(x_at, mask=inside[:, None] & (k < inner)[None, :], other=0.0)
        product = tl.dot(a, b, product, input_precision="ieee")
        dy_at += TOKENS * dy_stride
        x_at += TOKENS * x_stride
    scale = None
    if bad is not None:
        scale = power(tl.load(exponents + o * exponent_stride, mask=o < out, other=0))[:, None]
    _add(buffer, product, bad, scale, limit, out, inner, tile_out * OUT, tile_inner * INNER, FIRST, OUT, INNER, PARTS)


@triton.jit
def _add(
    buffer, product, bad, scale, limit, out, inner, out_at, inner_at,
    FIRST: tl.constexpr, OUT: tl.constexpr, INNER: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Add the product to the buffer in PARTS blocks of columns, because the registers cannot hold it all at once."""
    if PARTS > 1:
        half: tl.constexpr = INNER // 2
        left, right = tl.split(tl.permute(tl.reshape(product, (OUT, 2, half)), (0, 2, 1)))
        _add(buffer, left, bad, scale, limit, out, inner, out_at, inner_at, FIRST, OUT, half, PARTS // 2)
        _add(buffer, right, bad, scale, limit, out, inner, out_at, inner_at + half, FIRST, OUT, half, PARTS // 2)
    else:
        o, k = out_at + tl.arange(0, OUT), inner_at + tl.arange(0, INNER)
        at = buffer + o.to(tl.int64)[:, None] * inner + k[None, :]
        mask = (o < out)[:, None] & (k < inner)[None, :]
        if bad is not None:
            product, fits, finite = to_steps(product, scale, limit)
            raise_flags(bad, fits, finite, mask)
        if not FIRST:
            product += tl.load(at, mask=mask, other=0)
        tl.store(at, product.to(buffer.dtype.element_ty), mask=mask)
