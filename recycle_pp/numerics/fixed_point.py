"""Fixed-point sums in int64 or int32, which depend neither on the order nor on the placement of their terms.

    e = exponents(largest, terms, INT64)                        # (rows,) int32: quantum 2^-e of each row
    ops.accumulate(total, grad, e, limit(terms, INT64), bad, first)    # total += round(grad 2^e); `bad` flags misfits
    ops.restore(total, e, out)                                  # out = total 2^-e, float32
    prepare()                                                   # once per process: makes torch deterministic

Every element is rounded once, to a multiple of 2^-e, the quantum of its row. After that the sum is exact: any split of
the terms over workers, in any order, gives the same bits. All rows of a unit (see `layout`) share one exponent. The
exponent leaves room for the largest number of terms, and for a gradient 2^`growth` times as large as the previous one.
With 16 terms, an element of 2^-22 times the unit's largest still keeps the 24 bits of a float32, and the rounding of a
term changes no element by more than 2^-46 of the largest. This file defines the format. `numerics.operations` computes
in this format, with the same bits on a CPU and in kernels.

INT32 takes half of the memory. Each row then has its own exponent. The expected magnitude of a row is at least `FLOOR`
times the tensor's largest element, so that a row that was idle (the row of a rare token) still fits when it becomes
active. With 16 terms the largest element of a row keeps 18 bits. The magnitude of the first gradient is unknown, so the
first step is computed twice.

If a finite number does not fit, the training step is repeated, not skipped. In the n-th repetition every exponent is
n * `Format.step` smaller than in the first attempt. It is computed from the first attempt's exponent, so a worker that
rejoins between two repetitions has the same exponents as its peers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

FIRST = 1.0  # expected magnitude of the first gradient
FLOOR = 2.0**-6  # minimum expected magnitude of a row, as a share of the tensor's largest element
LEAST_BITS = 16  # bits that the largest element of a row must keep


@dataclass(frozen=True)
class Format:
    """A fixed-point format.

    dtype: dtype of the sums
    bits: a sum stays below 2^bits quanta
    growth: a gradient still fits if it is 2^growth times as large as the previous one
    step: bits of room that each repetition of a training step adds
    """

    dtype: torch.dtype
    bits: int
    growth: int
    step: int

    @property
    def by_row(self) -> bool:
        """Whether each row has its own exponent. Otherwise each unit has one."""
        return self.dtype == torch.int32

    def kept(self, terms: int) -> int:
        """The minimum number of bits that the largest element of a row keeps in a sum of `terms` terms."""
        return self.bits - self.growth - _log2(terms)


INT64 = Format(torch.int64, bits=62, growth=12, step=24)
INT32 = Format(torch.int32, bits=30, growth=8, step=6)


def prepare() -> None:
    """Makes cuBLAS and attention deterministic, as they are on a CPU. Call it before the process first uses CUDA."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    # This is used instead of use_deterministic_algorithms, which imports torch.compile and takes a second.
    torch.set_deterministic_debug_mode("error")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # would only cost time


def exponents(largest: Tensor, terms: int, of: Format = INT64) -> Tensor:
    """Exponents e (int32, shape of `largest`) of the quanta 2^-e for sums of `terms` tensors.

    largest: largest magnitudes of the previous sums, float32, positive"""
    _, bits = torch.frexp(largest)
    return (of.kept(terms) - bits).clamp_(-126, 126)  # keeps 2^e a normal float32


def powers(e: Tensor) -> Tensor:
    """2^e as float32, exact. e: int32, -126 <= e <= 126."""
    return ((e + 127) << 23).view(torch.float32)


def limit(terms: int, of: Format = INT64) -> float:
    """Bound in quanta for each of `terms` addends. If all addends are below the bound, their sum fits."""
    return 2.0 ** (of.bits - _log2(terms))


def _log2(terms: int) -> int:
    return (terms - 1).bit_length()
