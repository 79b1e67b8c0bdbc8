"""Sums that depend neither on the order nor on the place of their terms: int64 fixed point.

    e = exponent(largest, terms)                            # the largest magnitude the last sum had -> quantum 2^-e
    ops.accumulate(total, grad, e, limit(terms), bad, first)    # total += round(grad 2^e); `bad` if it does not fit
    ops.restore(total, e, out)                              # total 2^-e as float32
    prepare()                                               # once a process: the same bits from every call

Every element is rounded to a multiple of the quantum 2^-e of its tensor, once; from there on the sum is exact, so any
split of the terms over workers, in any order, gives the same bits. e leaves room for a sum `GROWTH` times the last one
and for the largest number of terms; with 16 terms an element 2^-22 of the tensor's largest still keeps the 24 bits
that a float32 has, and rounding a term moves no element by more than 2^-46 of the largest. This file is the format;
`numerics.operations` computes in it, on a CPU or in kernels, with the same bits.
"""

from __future__ import annotations

import math
import os

import torch

GROWTH = 12  # bits: a gradient may be 4096 times the last step's before a step is refused
FIRST = 1.0  # the largest gradient to expect before any was seen
COARSER = 24  # bits that the quantum grows after a sum that did not fit


def prepare() -> None:
    """Before a process's first CUDA call: cuBLAS and attention give the same bits every time, as a CPU does anyway."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    # Not use_deterministic_algorithms: that also sets up torch.compile, whose import takes a second.
    torch.set_deterministic_debug_mode("error")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # only costs time


def exponent(largest: float, terms: int) -> int:
    """e of the quantum 2^-e for a sum of `terms` tensors whose last sum had the magnitude `largest`."""
    _, bits = math.frexp(largest)
    return max(-126, min(126, 62 - GROWTH - _log2(terms) - bits))  # so that 2^e is an ordinary float32


def limit(terms: int) -> float:
    """Steps that each of `terms` addends must stay below: then their sum fits an int64."""
    return 2.0 ** (62 - _log2(terms))


def _log2(terms: int) -> int:
    return (terms - 1).bit_length()
