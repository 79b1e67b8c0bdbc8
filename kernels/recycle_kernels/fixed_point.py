"""Sums that do not depend on their order: gradients in fixed point, for `numerics.reproducible`.

    q = torch.zeros(rows, columns, dtype=torch.int64); bad = torch.zeros(2, dtype=torch.float64)
    quantise_add(q, grad, exponents, limit, bad)     # q += rint(grad * 2^exponents), in any order, on any peer
    dequantise(q, exponents, total)                  # total = q * 2^-exponents, after the integer all-reduce

Floating-point addition is not associative, integer addition is: whichever peer ran a micro-batch, and in whatever
order the parts arrive, the int64 sum has the same bits. An addend is rounded once, half to even, to a multiple of
2^-exponent. `bad[0]` becomes 1 (and the element counts as 0) when an addend is NaN, infinite, or of `limit` steps and
more, `bad[1]` when it is NaN or infinite. Who adds up chooses the format: exponents that all peers agree on, int32
(rows,), -126 <= exponent <= 126, one for every row of equal length that the tensor consists of; int64 or int32 for q;
and a limit, a power of two, such that q holds as many addends as there will be. `first`: the sum was empty, q is
written and not read. Tensors are contiguous and of equal size; grad is float32 or bfloat16, bad (2,) of any dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
_ROUND = tl.constexpr(1.5 * 2.0**52)  # adding it pushes the fraction of a float64 below 2^51 out of the mantissa
_WHOLE = tl.constexpr(2.0**51)  # a float32 above 2^23 is whole anyway


def quantise_add(q: Tensor, grad: Tensor, exponents: Tensor, limit: float, bad: Tensor, first: bool = False) -> None:
    """q (int64 or int32) += rint(grad * 2^exponents); bad[0] becomes 1 when an element is not below `limit` steps."""
    n = grad.numel()
    _quantise_kernel[(triton.cdiv(n, BLOCK),)](
        q, grad, exponents, bad, n, n // len(exponents), limit, FIRST=first, BLOCK=BLOCK, num_warps=4
    )


def quantise_add_reference(
    q: Tensor, grad: Tensor, exponents: Tensor, limit: float, bad: Tensor, first: bool = False
) -> None:
    """The same in plain torch, equal in every bit."""
    steps = _rows(grad.double(), exponents) * _powers(exponents)
    fits = steps.abs() < limit  # false for NaN
    q.copy_((0 if first else q) + torch.where(fits, steps.round(), 0.0).to(q.dtype).view_as(q))
    bad[0].masked_fill_(~fits.all(), 1)
    bad[1].masked_fill_(~grad.isfinite().all(), 1)


def dequantise(q: Tensor, exponents: Tensor, out: Tensor) -> None:
    """out (float32) = q * 2^-exponents, rounded once."""
    n = q.numel()
    _dequantise_kernel[(triton.cdiv(n, BLOCK),)](q, out, exponents, n, n // len(exponents), BLOCK=BLOCK, num_warps=4)


def dequantise_reference(q: Tensor, exponents: Tensor, out: Tensor) -> None:
    """The same in plain torch, equal in every bit."""
    out.copy_((_rows(q.float(), exponents) * _powers(-exponents).float()).view_as(out))


def _rows(tensor: Tensor, exponents: Tensor) -> Tensor:
    return tensor.reshape(len(exponents), -1)


def _powers(exponents: Tensor) -> Tensor:
    return exponents.double().exp2().unsqueeze(1)


@triton.jit
def to_steps(grad, scale, limit):
    """(int64 steps, whether each fits, whether each is finite) of a float32 block."""
    steps = grad.to(tl.float64) * scale
    fits, finite = tl.abs(steps) < limit, tl.abs(grad) < float("inf")
    steps = tl.where(fits, steps, 0.0)
    return tl.where(tl.abs(steps) < _WHOLE, (steps + _ROUND) - _ROUND, steps).to(tl.int64), fits, finite


@triton.jit
def raise_flags(bad, fits, finite, mask):
    """bad[0] = 1 unless all fit, bad[1] = 1 unless all are finite; every program writes the same value, so their order
    does not matter."""
    tl.store(bad, 1, mask=tl.max((mask & (fits == 0)).to(tl.int32)) > 0)
    tl.store(bad + 1, 1, mask=tl.max((mask & (finite == 0)).to(tl.int32)) > 0)


@triton.jit
def power(exponent):
    """2^exponent as float32, exact: made of its bits."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _quantise_kernel(q, grad, exponents, bad, n, columns, limit, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    scale = power(tl.load(exponents + at // columns, mask=mask, other=0))
    steps, fits, finite = to_steps(tl.load(grad + at, mask=mask, other=0.0).to(tl.float32), scale, limit)
    if not FIRST:
        steps += tl.load(q + at, mask=mask, other=0)
    tl.store(q + at, steps.to(q.dtype.element_ty), mask=mask)
    raise_flags(bad, fits, finite, mask)


@triton.jit
def _dequantise_kernel(q, out, exponents, n, columns, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    scale = power(-tl.load(exponents + at // columns, mask=mask, other=0))
    tl.store(out + at, tl.load(q + at, mask=mask, other=0).to(tl.float32) * scale, mask=mask)
