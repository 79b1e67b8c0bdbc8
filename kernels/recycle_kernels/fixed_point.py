"""Sums that do not depend on their order: gradients in fixed point, for `numerics.reproducible`.

    q = torch.zeros(n, dtype=torch.int64); bad = torch.zeros((), dtype=torch.float64)
    quantise_add(q, grad, exponent, terms, bad)      # q += rint(grad * 2^exponent), in any order, on any peer
    total = dequantise(q, exponent)                  # float32, after the integer all-reduce

Floating-point addition is not associative, integer addition is: whichever peer ran a micro-batch, and in whatever
order the parts arrive, the int64 sum has the same bits. An addend is rounded once, half to even, to a multiple of
2^-exponent. `bad` becomes 1 (and the element counts as 0) when an addend is NaN, infinite, or so large that `terms`
such addends could overflow: 2^62 / terms steps, terms rounded up to a power of two. Tensors are contiguous and of
equal size; grad is float32 or bfloat16, bad a scalar or one element of any dtype; -126 <= exponent <= 126, one for a
tensor, agreed by all peers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
_ROUND = tl.constexpr(1.5 * 2.0**52)  # adding it pushes the fraction of a float64 below 2^51 out of the mantissa
_WHOLE = tl.constexpr(2.0**51)  # a float32 above 2^23 is whole anyway


def quantise_add(q: Tensor, grad: Tensor, exponent: int, terms: int, bad: Tensor) -> None:
    """q (int64) += rint(grad * 2^exponent), one of at most `terms` addends; bad becomes 1 when it does not fit."""
    n = grad.numel()
    _quantise_kernel[(triton.cdiv(n, BLOCK),)](
        q, grad, bad, n, 2.0**exponent, addend_limit(terms), BLOCK=BLOCK, num_warps=4
    )


def quantise_add_reference(q: Tensor, grad: Tensor, exponent: int, terms: int, bad: Tensor) -> None:
    """The same in plain torch, equal in every bit."""
    steps = grad.double() * 2.0**exponent
    fits = steps.abs() < addend_limit(terms)  # false for NaN
    q += torch.where(fits, steps.round(), 0.0).long()
    bad.masked_fill_(~fits.all(), 1)


def dequantise(q: Tensor, exponent: int) -> Tensor:
    """q * 2^-exponent, rounded once to float32."""
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    n = q.numel()
    _dequantise_kernel[(triton.cdiv(n, BLOCK),)](q, out, n, 2.0**-exponent, BLOCK=BLOCK, num_warps=4)
    return out


def dequantise_reference(q: Tensor, exponent: int) -> Tensor:
    """The same in plain torch, equal in every bit."""
    return q.float() * 2.0**-exponent


def addend_limit(terms: int) -> float:
    """Steps that an addend stays below so that `terms` of them fit an int64."""
    return 2.0 ** (62 - (terms - 1).bit_length())


@triton.jit
def to_steps(grad, scale, limit):
    """(int64 steps, whether each fits) of a float32 block; `scale` and `limit` are powers of two."""
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
def _quantise_kernel(q, grad, bad, n, scale, limit, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    steps, fits = to_steps(tl.load(grad + at, mask=mask, other=0.0).to(tl.float32), scale, limit)
    tl.store(q + at, tl.load(q + at, mask=mask, other=0) + steps, mask=mask)
    raise_flag(bad, fits, mask)


@triton.jit
def _dequantise_kernel(q, out, n, scale, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    steps = tl.load(q + at, mask=at < n, other=0)
    tl.store(out + at, steps.to(tl.float32) * scale, mask=at < n)
