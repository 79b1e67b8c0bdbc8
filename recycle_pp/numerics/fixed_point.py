"""Sums that depend neither on the order nor on the place of their terms: fixed point in int64.

    e = exponents(largest, terms, INT64)                        # (rows,) int32: quantum 2^-e of each row
    ops.accumulate(total, grad, e, limit(terms, INT64), bad, first)    # total += round(grad 2^e); `bad`: did not fit
    ops.restore(total, e, out)                                  # total 2^-e as float32
    prepare()                                                   # once a process: the same bits from every call

Every element is rounded to a multiple of the quantum 2^-e of its row, once; from there on the sum is exact, so any
split of the terms over workers, in any order, gives the same bits. The rows of a block (see `layout`) have one
exponent. e leaves room for a sum `growth` bits above the last one and for the largest number of terms; with 16 terms an
element 2^-22 of the block's largest still keeps the 24 bits that a float32 has, and rounding a term moves no element by
more than 2^-46 of the largest. This file is the format; `numerics.operations` computes in it, on a CPU or in kernels,
with the same bits.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

FIRST = 1.0  # the largest gradient to expect before any was seen
COARSER = 24  # bits that the quantum grows after a sum that did not fit


@dataclass(frozen=True)
class Format:
    """dtype of the sums; bits: a sum stays below 2^bits steps; growth: bits that a gradient may grow from one step to
    the next before it does not fit."""

    dtype: torch.dtype
    bits: int
    growth: int


INT64 = Format(torch.int64, bits=62, growth=12)


def prepare() -> None:
    """Before a process's first CUDA call: cuBLAS and attention give the same bits every time, as a CPU does anyway."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    # Not use_deterministic_algorithms: that also sets up torch.compile, whose import takes a second.
    torch.set_deterministic_debug_mode("error")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # only costs time


def exponents(largest: Tensor, terms: int, of: Format = INT64) -> Tensor:
    """e (int32, the shape of `largest`) of the quanta 2^-e for sums of `terms` tensors whose last sums had these
    magnitudes, float32 above 0."""
    _, bits = torch.frexp(largest)
    return (of.bits - of.growth - _log2(terms) - bits).clamp_(-126, 126)  # so that 2^e is an ordinary float32


def powers(e: Tensor) -> Tensor:
    """2^e as float32, exact; e int32, -126 <= e <= 126."""
    return ((e + 127) << 23).view(torch.float32)


def limit(terms: int, of: Format = INT64) -> float:
    """Steps that each of `terms` addends must stay below: then their sum fits."""
    return 2.0 ** (of.bits - _log2(terms))


def _log2(terms: int) -> int:
    return (terms - 1).bit_length()
