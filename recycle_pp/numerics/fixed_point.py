"""Sums that depend neither on the order nor on the place of their terms: fixed point in int64, or in int32.

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

INT32 takes half of the memory. Each row has an exponent of its own then, and not less than `FLOOR` of the tensor's
largest is expected of it: rows come alive (a token that is seen for the first time in a while) and must fit. With 16
terms an element of a row's largest keeps 18 bits. Nothing is known of the first step's gradients, so it is done twice.

A finite number that does not fit is no reason to skip a step: it is done again, the n-th time with exponents that are
n times `step` less. They are a function of the last step's, so whoever comes back in between has them too.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

FIRST = 1.0  # the largest gradient to expect before any was seen
FLOOR = 2.0**-6  # of a tensor's largest: what is expected of a row at least
LEAST_BITS = 16  # that an element of a row's largest must keep


@dataclass(frozen=True)
class Format:
    """dtype of the sums; bits: a sum stays below 2^bits steps; growth: bits that a gradient may grow from one step to
    the next before it does not fit; step: bits that it may grow beyond in each attempt after that."""

    dtype: torch.dtype
    bits: int
    growth: int
    step: int

    @property
    def by_row(self) -> bool:
        """Each row has an exponent of its own, and not each block."""
        return self.dtype == torch.int32

    def kept(self, terms: int) -> int:
        """Bits that an element of a row's largest keeps, at least, in a sum of so many terms."""
        return self.bits - self.growth - _log2(terms)


INT64 = Format(torch.int64, bits=62, growth=12, step=24)
INT32 = Format(torch.int32, bits=30, growth=8, step=6)


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
    return (of.kept(terms) - bits).clamp_(-126, 126)  # so that 2^e is an ordinary float32


def powers(e: Tensor) -> Tensor:
    """2^e as float32, exact; e int32, -126 <= e <= 126."""
    return ((e + 127) << 23).view(torch.float32)


def limit(terms: int, of: Format = INT64) -> float:
    """Steps that each of `terms` addends must stay below: then their sum fits."""
    return 2.0 ** (of.bits - _log2(terms))


def _log2(terms: int) -> int:
    return (terms - 1).bit_length()
