"""Fixed-point sums in int64 or int32, which depend neither on the order nor on the placement of their terms.

    e = exponents(largest, terms, INT64)                        # (rows,) int32: quantum 2^-e of each row
    ops.accumulate(total, grad, e, limit(terms, INT64), bad, first)    # total += round(grad 2^e); `bad`: misfits
    ops.restore(total, e, out)                                  # out = total 2^-e, float32
    prepare()                                                   # once per process: every call is deterministic

Every element is rounded once, to a multiple of 2^-e, the quantum of its row. From then on the sum is exact: any split
of the terms over workers, in any order, gives the same bits. All rows of a unit (see `layout`) share one exponent. The
exponent leaves room for the largest number of terms and for `growth` bits above the last sum. With 16 terms an element
2^-22 of the unit's largest still keeps the 24 bits of a float32, and rounding a term moves no element by more than
2^-46 of the largest. This file defines the format. `numerics.operations` computes in it with the same bits, on a CPU
and in kernels.

INT32 takes half of the memory. Each row then has its own exponent, for at least `FLOOR` of the tensor's largest
element: a row that was idle (a token that was rare for a while) must fit when it becomes active. With 16 terms an
element of a row's largest keeps 18 bits. The magnitude of the first gradient is unknown, so the first step is computed
twice.

A finite number that does not fit does not skip the step. The step is repeated, and its n-th repetition has exponents
that are n times `step` smaller. They are a function of the last step's exponents, so a worker that returns in between
has the same ones.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

FIRST = 1.0  # the largest gradient to expect before the first step
FLOOR = 2.0**-6  # the least magnitude to expect of a row, as a share of the tensor's largest
LEAST_BITS = 16  # bits that the largest element of a row must keep


@dataclass(frozen=True)
class Format:
    """dtype of the sums.

    bits: a sum stays below 2^bits quanta
    growth: bits by which a gradient may exceed the last one and still fit
    step: further bits of room in each repetition of a step
    """

    dtype: torch.dtype
    bits: int
    growth: int
    step: int

    @property
    def by_row(self) -> bool:
        """Each row has its own exponent. Otherwise each unit has one."""
        return self.dtype == torch.int32

    def kept(self, terms: int) -> int:
        """Bits that an element as large as its row's largest keeps, at least, in a sum of `terms` terms."""
        return self.bits - self.growth - _log2(terms)


INT64 = Format(torch.int64, bits=62, growth=12, step=24)
INT32 = Format(torch.int32, bits=30, growth=8, step=6)


def prepare() -> None:
    """Makes cuBLAS and attention deterministic, as a CPU is. Call it before the first CUDA call of a process."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    # Not use_deterministic_algorithms: it imports torch.compile, which takes a second.
    torch.set_deterministic_debug_mode("error")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # only costs time


def exponents(largest: Tensor, terms: int, of: Format = INT64) -> Tensor:
    """Exponents e (int32, shape of `largest`) of the quanta 2^-e for sums of `terms` tensors.

    largest: float32 above 0, the magnitudes of the last sums"""
    _, bits = torch.frexp(largest)
    return (of.kept(terms) - bits).clamp_(-126, 126)  # keeps 2^e a normal float32


def powers(e: Tensor) -> Tensor:
    """2^e as float32, exact. e: int32, -126 <= e <= 126."""
    return ((e + 127) << 23).view(torch.float32)


def limit(terms: int, of: Format = INT64) -> float:
    """Bound in quanta for each of `terms` addends: below it, their sum fits."""
    return 2.0 ** (of.bits - _log2(terms))


def _log2(terms: int) -> int:
    return (terms - 1).bit_length()
