"""AdamW for a whole stage in one launch, with what a commit needs: the norm, the clip scale, the undo copy.

    chunks = make_chunks(sizes, decayed, device)                       # once: where the parameters lie
    squares = squared_norms(grad, chunks)                              # float64 [parameters], the vote
    adamw(state, grad, chunks, AdamW(lr=1e-3), step=1, scale=0.5, undo=undo)
    roll_back(state, undo)                                             # post-validation said no

All tensors are flat, contiguous, of equal length: a stage's parameters one after another. Each program takes a chunk
that lies in one parameter, so that matrices decay and norm weights do not without a mask. `state` is (param, exp_avg,
exp_avg_sq), float32; grad is float32 or bfloat16.

Formula (Loshchilov and Hutter 2019, arXiv:1711.05101, in torch.optim.AdamW's order), g = grad * scale:

    p  = p (1 - lr * weight_decay)
    m  = m + (1 - beta1) (g - m)
    v  = beta2 v + (1 - beta2) g^2
    p -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

AdamW cannot be inverted bit by bit, hence `undo`: three tensors that receive the state as it was, in the same pass (40
bytes an element instead of 28). Division and square root are correctly rounded. The norms are summed in float64, in a
fixed order.
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
    """Where the parameters lie in the flat tensors, cut into chunks of at most BLOCK elements."""

    starts: Tensor  # int64 [chunks + 1], the last is the number of elements
    decayed: Tensor  # float32 [chunks]: 1.0 where weight decay applies
    counts: list[int]  # chunks of each parameter
    aligned: bool  # all starts are multiples of 4: elements are loaded four at a time


def make_chunks(sizes: Sequence[int], decayed: Sequence[bool], device: torch.device | str) -> Chunks:
    """The chunks of parameters of `sizes` elements, one after another; `decayed` says which take weight decay."""
    firsts = np.cumsum([0, *sizes])
    pieces = [np.arange(first, first + size, BLOCK) for first, size in zip(firsts, sizes, strict=False)]
    counts = [len(piece) for piece in pieces]
    starts = np.concatenate([*pieces, firsts[-1:]])
    flags = torch.from_numpy(np.repeat(np.array(decayed, dtype=np.float32), counts))
    return Chunks(torch.from_numpy(starts).to(device), flags.to(device), counts, not (starts % 4).any())


def adamw(
    state: State, grad: Tensor, chunks: Chunks, hyper: AdamW, step: int, scale: float = 1.0, undo: State | None = None
) -> None:
    """One step in place; `step` counts from 1."""
    decay, correction = hyper.lr * hyper.weight_decay, (1 - hyper.beta2**step) ** 0.5
    _adamw_kernel[(len(chunks.decayed),)](
        *state, grad, *(undo or (None, None, None)), chunks.starts, chunks.decayed, scale, decay,
        1 - hyper.beta1, hyper.beta2, 1 - hyper.beta2, hyper.lr / (1 - hyper.beta1**step), correction, hyper.eps,
        **_launch(chunks),
    )  # fmt: skip


def adamw_reference(
    state: State, grad: Tensor, chunks: Chunks, hyper: AdamW, step: int, scale: float = 1.0, undo: State | None = None
) -> None:
    """The same in plain torch."""
    for copy, live in zip(undo or (), state, strict=False):
        copy.copy_(live)
    param, mean, square = state
    g = grad.to(param.dtype) * scale
    decayed = chunks.decayed.repeat_interleave(chunks.starts.diff()).to(param.dtype)
    param.mul_(1 - hyper.lr * hyper.weight_decay * decayed)
    mean.lerp_(g, 1 - hyper.beta1)
    square.mul_(hyper.beta2).addcmul_(g, g, value=1 - hyper.beta2)
    denominator = (square.sqrt() / (1 - hyper.beta2**step) ** 0.5).add_(hyper.eps)
    param.addcdiv_(mean, denominator, value=-hyper.lr / (1 - hyper.beta1**step))


def roll_back(state: State, undo: State) -> None:
    """The state before the last `adamw(..., undo=undo)`, bit by bit."""
    for live, copy in zip(state, undo, strict=True):
        live.copy_(copy)


def squared_norms(grad: Tensor, chunks: Chunks) -> Tensor:
    """The sum of squares of each parameter's part of grad, float64; not finite exactly if some element is not."""
    partial = torch.empty(len(chunks.decayed), dtype=torch.float64, device=grad.device)
    _norm_kernel[(len(partial),)](grad, partial, chunks.starts, **_launch(chunks))
    return torch.stack([part.sum() for part in partial.split(chunks.counts)])


def squared_norms_reference(grad: Tensor, chunks: Chunks) -> Tensor:
    """The same in plain torch."""
    chunk_sizes = chunks.starts.diff().split(chunks.counts)
    return torch.stack([part.double().square().sum() for part in grad.split([int(n.sum()) for n in chunk_sizes])])


def _launch(chunks: Chunks) -> dict[str, int]:
    """Elements loaded one at a time take an address each: twice the threads share those registers."""
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
    m = tl.load(exp_avg + at, mask=mask, other=0.0)
    v = tl.load(exp_avg_sq + at, mask=mask, other=0.0)
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
def _norm_kernel(grad, partial, starts, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    chunk = tl.program_id(0)
    at, mask = _places(starts, chunk, ALIGN, BLOCK)
    g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float64)
    tl.store(partial + chunk, tl.sum(g * g, axis=0))


@triton.jit
def _places(starts, chunk, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    """(elements of the chunk, mask)."""
    at = tl.multiple_of(tl.load(starts + chunk), ALIGN) + tl.arange(0, BLOCK)
    return at, at < tl.multiple_of(tl.load(starts + chunk + 1), ALIGN)
