"""Order-independent sums: gradients in fixed point, for `numerics.reproducible`.

    q = torch.zeros(rows, columns, dtype=torch.int64); bad = torch.zeros(2, dtype=torch.float64)
    quantise_add(q, grad, exponents, limit, bad)     # q += rint(grad * 2^exponents), in any order, on any peer
    dequantise(q, exponents, total)                  # total = q * 2^-exponents, after the integer all-reduce

Integer addition is associative, floating-point addition is not. So the int64 sum has the same bits for any assignment
of micro-batches to peers and any order of arrival. Each addend is rounded once, half to even, to a whole number of
steps; a step is 2^-exponent.

    q          int64 or int32, the sum
    grad       float32 or bfloat16, the addend
    exponents  int32 (rows,), -126 to 126, equal on all peers. One for each row of grad and q; rows have equal length
    limit      upper bound on the size of an addend's elements, in steps. A power of two, small enough that q cannot
               overflow with the expected number of addends
    bad        (2,) of any dtype. bad[0] becomes 1 if an element of grad is NaN, infinite, or not below `limit` steps;
               such an element counts as 0. bad[1] becomes 1 if an element is NaN or infinite
    first      whether the sum is still empty. If so, q is written without being read

Tensors are contiguous and of equal size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
_ROUND = tl.constexpr(1.5 * 2.0**52)  # adding it to a float64 below 2^51 rounds: the sum has no bits for a fraction
_WHOLE = tl.constexpr(2.0**51)  # larger values are integers, because they have only the 24 bits of a float32


def quantise_add(q: Tensor, grad: Tensor, exponents: Tensor, limit: float, bad: Tensor, first: bool = False) -> None:
    """q += rint(grad * 2^exponents). Sets `bad` for elements that do not fit (module docstring)."""
    n = grad.numel()
    _quantise_kernel[(triton.cdiv(n, BLOCK),)](
        q, grad, exponents, bad, n, n // len(exponents), limit, FIRST=first, BLOCK=BLOCK, num_warps=4
    )


def quantise_add_reference(
    q: Tensor, grad: Tensor, exponents: Tensor, limit: float, bad: Tensor, first: bool = False
) -> None:
    """`quantise_add` in plain torch, with the same bits."""
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
    """`dequantise` in plain torch, with the same bits."""
    out.copy_((_rows(q.float(), exponents) * _powers(-exponents).float()).view_as(out))


def _rows(tensor: Tensor, exponents: Tensor) -> Tensor:
    return tensor.reshape(len(exponents), -1)


def _powers(exponents: Tensor) -> Tensor:
    return exponents.double().exp2().unsqueeze(1)


@triton.jit
def to_steps(grad, scale, limit):
    """Returns (steps, fits, finite) for each element of a float32 block: the number of steps (int64; 0 if it does not
    fit), whether its absolute value is below the limit, and whether the element is finite."""
    steps = grad.to(tl.float64) * scale
    fits, finite = tl.abs(steps) < limit, tl.abs(grad) < float("inf")
    steps = tl.where(fits, steps, 0.0)
    return tl.where(tl.abs(steps) < _WHOLE, (steps + _ROUND) - _ROUND, steps).to(tl.int64), fits, finite


@triton.jit
def raise_flags(bad, fits, finite, mask):
    """Set bad[0] to 1 unless all elements fit, and bad[1] to 1 unless all are finite. All programs write the same
    value, so their order does not matter."""
    tl.store(bad, 1, mask=tl.max((mask & (fits == 0)).to(tl.int32)) > 0)
    tl.store(bad + 1, 1, mask=tl.max((mask & (finite == 0)).to(tl.int32)) > 0)


@triton.jit
def power(exponent):
    """2^exponent as float32, built from its bits and therefore exact."""
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
