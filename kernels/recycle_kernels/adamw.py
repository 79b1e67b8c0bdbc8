"""AdamW for a whole stage in one launch, with gradient norms, clip scale and undo copy for the commit.

    chunks = make_chunks(sizes, decayed, device)                       # once: the layout of the parameters
    squares = squared_norms(grad, chunks)                              # float64 [parameters], for the commit vote
    adamw(state, grad, chunks, AdamW(lr=1e-3), step=1, scale=0.5, undo=undo)
    roll_back(state, undo)                                             # if the step does not commit

All tensors are flat, contiguous and of equal length: the stage's parameters, concatenated. Each program processes a
chunk of a single parameter, so one flag per chunk decides whether weight decay applies. `state` is (param, exp_avg,
exp_avg_sq). param is float32. exp_avg, exp_avg_sq and grad are float32 or bfloat16.

Formula (Loshchilov and Hutter 2019, arXiv:1711.05101, in torch.optim.AdamW's order), g = grad * scale:

    p  = p (1 - lr * weight_decay)
    m  = m + (1 - beta1) (g - m)
    v  = beta2 v + (1 - beta2) g^2
    p -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

All of it is computed in float32. If exp_avg and exp_avg_sq are bfloat16, m and v are rounded to nearest even when they
are stored. p is computed from their values before the rounding.

AdamW cannot be inverted exactly. So the same pass can copy the previous state into the three tensors of `undo`. Per
element it then reads and writes 40 bytes instead of 28, or 28 instead of 20 with bfloat16 moments. Division and square
root are correctly rounded. Norms are summed in float64, in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048

State = tuple[Tensor, Tensor, Tensor]  # param, exp_avg, exp_avg_sq


class AdamW(NamedTuple):
    """The hyperparameters of one step."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0


class Chunks(NamedTuple):
    """The layout of the parameters in the flat tensors, in chunks of at most BLOCK elements."""

    starts: Tensor  # int64 [chunks + 1]: first element of each chunk, then the number of all elements
    decayed: Tensor  # float32 [chunks]: 1.0 if weight decay applies
    counts: list[int]  # chunks per parameter
    places: Tensor  # int64 [chunks]: where `squared_norms` puts the sum of each chunk (`_rooms`)
    aligned: bool  # whether all starts are multiples of 4, so that loads take four elements at a time


def make_chunks(sizes: Sequence[int], decayed: Sequence[bool], device: torch.device | str) -> Chunks:
    """The chunks of concatenated parameters.

    sizes    number of elements of each parameter
    decayed  whether weight decay applies to each parameter
    device   device of the chunks' tensors"""
    firsts = np.cumsum([0, *sizes])
    pieces = [np.arange(first, first + size, BLOCK) for first, size in zip(firsts, sizes, strict=False)]
    counts = [len(piece) for piece in pieces]
    starts = np.concatenate([*pieces, firsts[-1:]])
    flags = torch.from_numpy(np.repeat(np.array(decayed, dtype=np.float32), counts))
    rooms = np.cumsum([0, *_rooms(counts)])
    places = torch.from_numpy(np.arange(sum(counts)) + np.repeat(rooms[:-1] - np.cumsum([0, *counts])[:-1], counts))
    aligned = not (starts % 4).any()
    return Chunks(torch.from_numpy(starts).to(device), flags.to(device), counts, places.to(device), aligned)


def adamw(
    state: State, grad: Tensor, chunks: Chunks, hyper: AdamW, step: int, scale: float = 1.0, undo: State | None = None
) -> None:
    """Run one AdamW step in place.

    step   number of the step, from 1
    scale  factor on grad
    undo   receives the state before the step"""
    decay, correction = hyper.lr * hyper.weight_decay, (1 - hyper.beta2**step) ** 0.5
    _adamw_kernel[(len(chunks.decayed),)](
        *state, grad, *(undo or (None, None, None)), chunks.starts, chunks.decayed, scale, decay,
        1 - hyper.beta1, hyper.beta2, 1 - hyper.beta2, hyper.lr / (1 - hyper.beta1**step), correction, hyper.eps,
        **_launch(chunks),
    )  # fmt: skip


def adamw_reference(state: State, grad: Tensor, chunks: Chunks, hyper: AdamW, step: int, scale: float = 1.0) -> None:
    """`adamw` in plain torch."""
    param, mean, square = state
    g = grad.to(param.dtype) * scale
    decayed = chunks.decayed.repeat_interleave(chunks.starts.diff()).to(param.dtype)
    param.mul_(1 - hyper.lr * hyper.weight_decay * decayed)
    new_mean = mean.to(param.dtype).lerp(g, 1 - hyper.beta1)
    new_square = (square.to(param.dtype) * hyper.beta2).addcmul_(g, g, value=1 - hyper.beta2)
    denominator = (new_square.sqrt() / (1 - hyper.beta2**step) ** 0.5).add_(hyper.eps)
    param.addcdiv_(new_mean, denominator, value=-hyper.lr / (1 - hyper.beta1**step))
    mean.copy_(new_mean)
    square.copy_(new_square)


def roll_back(state: State, undo: State) -> None:
    """Restore the state before the last `adamw(..., undo=undo)`, bit for bit."""
    for live, copy in zip(state, undo, strict=True):
        live.copy_(copy)


def squared_norms(grad: Tensor, chunks: Chunks) -> Tensor:
    """[parameters] float64: sum of squares of each parameter's gradient. The sum is non-finite if and only if the
    gradient has a NaN or infinite element. If a parameter begins at a multiple of 4 elements, the bits of its sum do
    not depend on the other parameters."""
    rooms = _rooms(chunks.counts)
    partial = torch.empty(sum(rooms), dtype=torch.float64, device=grad.device)
    _norm_kernel[(len(chunks.decayed),)](grad, partial, chunks.starts, chunks.places, **_launch(chunks))
    parts = zip(partial.split(rooms), chunks.counts, strict=True)
    return torch.stack([part[:count].sum() for part, count in parts])


def squared_norms_reference(grad: Tensor, chunks: Chunks) -> Tensor:
    """`squared_norms` in plain torch."""
    chunk_sizes = chunks.starts.diff().split(chunks.counts)
    return torch.stack([part.double().square().sum() for part in grad.split([int(n.sum()) for n in chunk_sizes])])


def _rooms(counts: Sequence[int]) -> list[int]:
    """The counts rounded up to multiples of 4, so that the sums of each parameter begin at a multiple of 4. On a GPU,
    the order in which torch sums a vector depends on the vector's alignment."""
    return [count + -count % 4 for count in counts]


def _launch(chunks: Chunks) -> dict[str, int]:
    """Launch options. Unaligned loads keep one address per element in registers, so a chunk gets twice as many threads
    if it is unaligned."""
    return {"BLOCK": BLOCK, "ALIGN": 4 if chunks.aligned else 1, "num_warps": 4 if chunks.aligned else 8}


@triton.jit
def _adamw_kernel(
    param, exp_avg, exp_avg_sq, grad, undo_param, undo_avg, undo_sq, starts, decayed,
    scale, decay, one_minus_beta1, beta2, one_minus_beta2, step_size, root_correction, eps,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    at, mask = _places(starts, chunk, ALIGN, BLOCK)
    p = tl.load(param + at, mask=mask, other=0.0)
    g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32) * scale
    m = tl.load(exp_avg + at, mask=mask).to(tl.float32)  # no `other`: Triton's interpreter lacks it for bfloat16
    v = tl.load(exp_avg_sq + at, mask=mask).to(tl.float32)
    if undo_param is not None:
        tl.store(undo_param + at, p, mask=mask)
        tl.store(undo_avg + at, m, mask=mask)
        tl.store(undo_sq + at, v, mask=mask)
    p *= 1.0 - decay * tl.load(decayed + chunk)
    m += one_minus_beta1 * (g - m)
    v = beta2 * v + one_minus_beta2 * g * g
    p -= step_size * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root_correction) + eps)
    tl.store(param + at, p, mask=mask)
    tl.store(exp_avg + at, m, mask=mask)
    tl.store(exp_avg_sq + at, v, mask=mask)


@triton.jit
def _norm_kernel(grad, partial, starts, places, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    chunk = tl.program_id(0)
    at, mask = _places(starts, chunk, ALIGN, BLOCK)
    g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float64)
    tl.store(partial + tl.load(places + chunk), tl.sum(g * g, axis=0))


@triton.jit
def _places(starts, chunk, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    """Returns (indices of the chunk's elements, mask)."""
    at = tl.multiple_of(tl.load(starts + chunk), ALIGN) + tl.arange(0, BLOCK)
    return at, at < tl.multiple_of(tl.load(starts + chunk + 1), ALIGN)
