"""The weight gradient of a linear layer, accumulated where the product is made: the heart of a deferred W.

    weight_grad(buffer, dy, x)                              # buffer [O, K] float32 += dy^T x
    weight_grad(buffer, dy, x, first=True)                  # buffer = dy^T x: it need not be zeroed, nor is it read
    weight_grad_fixed(q, dy, x, exponents, limit, bad)      # q [O, K] int64 += rint(dy^T x * 2^exponents), [O] or [1]

dy [T, O] and x [T, K] are bfloat16, float16 or float32 with adjacent elements in a row; the product is summed in
float32 (float32 operands are multiplied as such, not as tf32) and added to the buffer in the epilogue, so the gradient
of a micro-batch is neither rounded to bfloat16 nor written and read once more. Each tile of the buffer belongs to one
program, which sums over T in one fixed order: no atomics, no split of T, the same bits every time for the same `Tile`.
The fixed-point form (see fixed_point.py) makes the sum over micro-batches independent of their order as well.

Another tile adds in another order. So it is a table, `tile_of(...)`, a pure function of shape, dtype and architecture:
peers with the same GPU launch the same program without asking each other, and none measures anything at its start.
`tile=` is for benchmarks, which tell whether the table should change.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from .fixed_point import power, raise_flags, to_steps

# rounds in which a tile is added to the buffer, 64 or more elements a thread: fewer spill, or keep a second program out
ROUNDS, ROUNDS_FIXED = 2, 8


class Tile(NamedTuple):
    """What one program computes: an [out, inner] tile of the buffer, `tokens` rows of dy and x at a time."""

    out: int
    inner: int
    tokens: int
    group: int = 8  # rows of tiles that run together and share x in the L2 cache
    warps: int = 4
    stages: int = 3  # loads in flight


def weight_grad(buffer: Tensor, dy: Tensor, x: Tensor, *, first: bool = False, tile: Tile | None = None) -> None:
    """buffer [O, K] (float32, contiguous) += dy^T x; `first`: =."""
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
    """q [O, K] (int64 or int32, contiguous) += rint(dy^T x * 2^exponents); exponents int32 [O], or [1] for all rows;
    `first`: =. For the rest see fixed_point.py."""
    _launch(q, dy, x, bad, exponents, limit, first, tile)


def weight_grad_reference(buffer: Tensor, dy: Tensor, x: Tensor) -> None:
    """`weight_grad` in plain torch."""
    wide = buffer.dtype
    buffer.addmm_(dy.to(wide).T, x.to(wide))


def tile_of(out: int, inner: int, dtype: torch.dtype, arch: int) -> Tile:
    """The largest tile that still gives every multiprocessor of a large GPU (about 130) work. `arch`: 80, 90, 100."""
    if dtype == torch.float32:  # no tensor cores: registers are the limit
        return Tile(64, 64, 16)
    if out * inner < 130 * 128 * 128:
        return Tile(64, 64, 64)
    if out * inner < 130 * 128 * 256 or inner % 16:  # then x is loaded an element at a time: registers for addresses
        return Tile(128, 128, 64, warps=8)
    if arch < 90:  # operands pass through registers, and 64 tokens of them would not fit beside the product
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
    arch = 0 if x.device.type == "cpu" else driver.active.get_current_target().arch  # cpu: the interpreter
    tile = tile or tile_of(out, inner, x.dtype, arch)
    a_thread = min(64, tile.out * tile.inner // (32 * tile.warps))  # elements; fewer than 64 take fewer rounds
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
    """Adds the product to its place, PARTS blocks of columns in turn: all at once does not fit the registers."""
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
