"""Sums that depend neither on the order nor on the place of their terms: int64 fixed point.

    e = exponent(largest, terms)                 # the largest magnitude the last sum had -> quantum 2^-e
    accumulate(total, grad, e, terms, bad)       # total += round(grad 2^e); counts what does not fit in `bad`
    restore(total, e, out)                       # total 2^-e as float32
    prepare()                                    # once a process: kernels whose bits do not vary from call to call

Every element is rounded to a multiple of the quantum 2^-e of its tensor, once; from there on the sum is exact, so any
split of the terms over workers, in any order, gives the same bits. e leaves room for a sum `GROWTH` times the last one
and for the largest number of terms; with 16 terms an element 2^-22 of the tensor's largest still keeps the 24 bits
that a float32 has, and rounding a term moves no element by more than 2^-46 of the largest.
"""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor

GROWTH = 12  # bits: a gradient may be 4096 times the last step's before a step is refused
FIRST = 1.0  # the largest gradient to expect before any was seen
COARSER = 24  # bits that the quantum grows after a sum that did not fit
BLOCK = 1 << 16  # elements: what stays in a core's cache while it is scaled, rounded and added


def prepare() -> None:
    """Before a process's first CUDA call: cuBLAS and attention give the same bits every time, as a CPU does anyway."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # only costs time


def exponent(largest: float, terms: int) -> int:
    """e of the quantum 2^-e for a sum of `terms` tensors whose last sum had the magnitude `largest`."""
    _, bits = math.frexp(largest)
    return max(-126, min(126, 62 - GROWTH - _log2(terms) - bits))  # so that 2^e is an ordinary float32


def accumulate(total: Tensor, grad: Tensor, e: int, terms: int, bad: Tensor, first: bool = False) -> None:
    """total (int64) += round(grad 2^e), or = for the first term. `grad` (float32, equal size) is destroyed.

    `bad` (float64 scalar) rises if an element is NaN, infinite or too large for `terms` terms; total is void then.
    """
    limit = 2.0 ** (62 - _log2(terms) - e)
    low, high = torch.aminmax(grad)
    bad += ~((high < limit) & (low > -limit))  # NaN fails every comparison
    for sums, values in zip(total.view(-1).split(BLOCK), grad.view(-1).split(BLOCK), strict=True):
        values.mul_(2.0**e).round_()
        if first:
            sums.copy_(values)
        else:
            sums += values.to(torch.int64)


def restore(total: Tensor, e: int, out: Tensor) -> None:
    """out = total 2^-e, rounded once to float32."""
    out.copy_(total).mul_(2.0**-e)


def _log2(terms: int) -> int:
    return (terms - 1).bit_length()
