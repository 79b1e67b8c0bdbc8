"""Sums that do not depend on their order: gradients in fixed point, for `numerics.reproducible`.

    q = torch.zeros(n, dtype=torch.int64); bad = torch.zeros((), dtype=torch.float64)
    quantise_add(q, grad, exponent, limit, bad)      # q += rint(grad * 2^exponent), in any order, on any peer
    dequantise(q, exponent, total)                   # total = q * 2^-exponent, after the integer all-reduce

Floating-point addition is not associative, integer addition is: whichever peer ran a micro-batch, and in whatever
order the parts arrive, the int64 sum has the same bits. An addend is rounded once, half to even, to a multiple of
2^-exponent. `bad` becomes 1 (and the element counts as 0) when an addend is NaN, infinite, or of `limit` steps and
more. Who adds up chooses the format: an exponent that all peers agree on, one for a tensor, -126 <= exponent <= 126,
and a limit, a power of two, such that the int64 holds as many addends as there will be. `first`: the sum was empty, q
is written and not read. Tensors are contiguous and of equal size; grad is float32 or bfloat16, bad a scalar of any
dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
_ROUND = tl.constexpr(1.5 * 2.0**52)  # adding it pushes the fraction of a float64 below 2^51 out of the mantissa
_WHOLE = tl.constexpr(2.0**51)  # a float32 above 2^23 is whole anyway


def quantise_add(q: Tensor, grad: Tensor, exponent: int, limit: float, bad: Tensor, first: bool = False) -> None:
    """q (int64) += rint(grad * 2^exponent); bad becomes 1 when an element is not below `limit` steps."""
    n = grad.numel()
    _quantise_kernel[(triton.cdiv(n, BLOCK),)](
        q, grad, bad, n, 2.0**exponent, limit, FIRST=first, BLOCK=BLOCK, num_warps=4
    )


def quantise_add_reference(
    q: Tensor, grad: Tensor, exponent: int, limit: float, bad: Tensor, first: bool = False
) -> None:
    """The same in plain torch, equal in every bit."""
    steps = grad.double() * 2.0**exponent
    fits = steps.abs() < limit  # false for NaN
    q.copy_((0 if first else q) + torch.where(fits, steps.round(), 0.0).long())
    bad.masked_fill_(~fits.all(), 1)


def dequantise(q: Tensor, exponent: int, out: Tensor) -> None:
    """out (float32) = q * 2^-exponent, rounded once."""
    n = q.numel()
    _dequantise_kernel[(triton.cdiv(n, BLOCK),)](q, out, n, 2.0**-exponent, BLOCK=BLOCK, num_warps=4)


def dequantise_reference(q: Tensor, exponent: int, out: Tensor) -> None:
    """The same in plain torch, equal in every bit."""
    out.copy_(q).mul_(2.0**-exponent)


@triton.jit
def to_steps(grad, scale, limit):
    """(int64 steps, whether each fits) of a float32 block."""
    steps = grad.to(tl.float64) * scale
    fits = tl.abs(steps) < limit
    steps = tl.where(fits, steps, 0.0)
    return tl.where(tl.abs(steps) < _WHOLE, (steps + _ROUND) - _ROUND, steps).to(tl.int64), fits


@triton.jit
def raise_flag(bad, fits, mask):
    """bad[0] = 1 unless all fit; every program writes the same value, so their order does not matter."""
    misfit = tl.max((mask & (fits == 0)).to(tl.int32))
    tl.store(bad, 1, mask=misfit > 0)


@triton.jit
def _quantise_kernel(q, grad, bad, n, scale, limit, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    steps, fits = to_steps(tl.load(grad + at, mask=mask, other=0.0).to(tl.float32), scale, limit)
    if not FIRST:
        steps += tl.load(q + at, mask=mask, other=0)
    tl.store(q + at, steps, mask=mask)
    raise_flag(bad, fits, mask)


@triton.jit
def _dequantise_kernel(q, out, n, scale, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    steps = tl.load(q + at, mask=at < n, other=0)
    tl.store(out + at, steps.to(tl.float32) * scale, mask=at < n)
