"""AdamW for a whole stage in one launch, with what the commit needs: norm, scale, clip factor, undo copy.

    squares = squared_norm(grad)                                       # float64 scalar on the device, the vote
    clip = clip_factor(total_squares, 1.0)                             # float32 scalar on the device
    chunks = make_chunks(sizes, decays, device)                        # once: which parameters take weight decay
    adamw(param, grad, exp_avg, exp_avg_sq, chunks, step=1, lr=1e-3, clip=clip, undo=undo)
    roll_back(param, exp_avg, exp_avg_sq, undo)                        # post-validation said no

All tensors are flat, contiguous, of equal length: a stage's parameters one after another. Each program takes a chunk
that lies in one parameter, so that matrices decay and norm weights do not without a mask. param, exp_avg and
exp_avg_sq are float32, grad float32 or bfloat16.

Formula (Loshchilov and Hutter 2019, arXiv:1711.05101, in torch.optim.AdamW's order), g = grad * scale * clip:

    p  = p (1 - lr * weight_decay)
    m  = m + (1 - beta1) (g - m)
    v  = beta2 v + (1 - beta2) g^2
    p -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

`clip` stays on the device, so nothing waits for the host. AdamW cannot be inverted bit by bit, hence `undo`: three
tensors that receive param, exp_avg and exp_avg_sq as they were, in the same pass (40 bytes an element instead of 28).
Division and square root are correctly rounded. `squared_norm` sums in float64, in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
NORM_BLOCK = 8192

Undo = tuple[Tensor, Tensor, Tensor]  # param, exp_avg, exp_avg_sq


class Chunks(NamedTuple):
    """Where the parameters lie in the flat tensors, cut into chunks of at most BLOCK elements."""

    starts: Tensor  # int64 [chunks + 1], the last is the number of elements
    decayed: Tensor  # float32 [chunks]: 1.0 where weight decay applies
    aligned: bool  # all starts are multiples of 4: elements are loaded four at a time


def make_chunks(sizes: Sequence[int], decayed: Sequence[bool], device: torch.device | str) -> Chunks:
    """The chunks of parameters of `sizes` elements, one after another; `decayed` says which take weight decay."""
    firsts = np.cumsum([0, *sizes])
    pieces = [np.arange(first, first + size, BLOCK) for first, size in zip(firsts, sizes, strict=False)]
    starts = np.concatenate([*pieces, firsts[-1:]])
    flags = np.repeat(np.array(decayed, dtype=np.float32), [len(piece) for piece in pieces])
    return Chunks(torch.from_numpy(starts).to(device), torch.from_numpy(flags).to(device), not (starts % 4).any())


def adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    chunks: Chunks,
    *,
    step: int,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    scale: float = 1.0,
    clip: Tensor | None = None,
    undo: Undo | None = None,
) -> None:
    """One step in place. `step` counts from 1; `clip` is a float32 scalar tensor."""
    _adamw_kernel[(len(chunks.decayed),)](
        param, grad, exp_avg, exp_avg_sq, clip, *(undo or (None, None, None)), chunks.starts, chunks.decayed,
        scale, lr * weight_decay, 1 - beta1, beta2, 1 - beta2, lr / (1 - beta1**step), (1 - beta2**step) ** 0.5,
        eps, ALIGN=4 if chunks.aligned else 1, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def adamw_reference(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    chunks: Chunks,
    *,
    step: int,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    scale: float = 1.0,
    clip: Tensor | None = None,
    undo: Undo | None = None,
) -> None:
    """The same in plain torch."""
    if undo is not None:
        for copy, state in zip(undo, (param, exp_avg, exp_avg_sq), strict=True):
            copy.copy_(state)
    g = grad.to(param.dtype) * scale
    if clip is not None:
        g *= clip
    param.mul_(1 - lr * weight_decay * chunks.decayed.repeat_interleave(chunks.starts.diff()).to(param.dtype))
    exp_avg.lerp_(g, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    denominator = (exp_avg_sq.sqrt() / (1 - beta2**step) ** 0.5).add_(eps)
    param.addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1**step))


def roll_back(param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, undo: Undo) -> None:
    """The state before the last `adamw(..., undo=undo)`, bit by bit."""
    for state, copy in zip((param, exp_avg, exp_avg_sq), undo, strict=True):
        state.copy_(copy)


def squared_norm(grad: Tensor) -> Tensor:
    """The sum of squares, a float64 scalar tensor; not finite exactly if some element is not."""
    n = grad.numel()
    partial = torch.empty(triton.cdiv(n, NORM_BLOCK), dtype=torch.float64, device=grad.device)
    _norm_kernel[(len(partial),)](grad, partial, n, BLOCK=NORM_BLOCK, num_warps=8)
    return partial.sum()


def squared_norm_reference(grad: Tensor) -> Tensor:
    """The same in plain torch."""
    return grad.double().square().sum()


def clip_factor(squares: Tensor, limit: float) -> Tensor:
    """min(1, limit / norm) from the job's squared norm, a float32 scalar tensor (as torch's clip_grad_norm_)."""
    return (limit / (squares.sqrt() + 1e-6)).clamp(max=1.0).float()


@triton.jit
def _adamw_kernel(
    param, grad, exp_avg, exp_avg_sq, clip, undo_param, undo_avg, undo_sq, starts, decayed,
    scale, decay, one_minus_beta1, beta2, one_minus_beta2, step_size, root_correction, eps,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    at = tl.multiple_of(tl.load(starts + chunk), ALIGN) + tl.arange(0, BLOCK)
    mask = at < tl.multiple_of(tl.load(starts + chunk + 1), ALIGN)
    p = tl.load(param + at, mask=mask, other=0.0)
    g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32) * scale
    m = tl.load(exp_avg + at, mask=mask, other=0.0)
    v = tl.load(exp_avg_sq + at, mask=mask, other=0.0)
    if undo_param is not None:
        tl.store(undo_param + at, p, mask=mask)
        tl.store(undo_avg + at, m, mask=mask)
        tl.store(undo_sq + at, v, mask=mask)
    if clip is not None:
        g *= tl.load(clip)
    p *= 1.0 - decay * tl.load(decayed + chunk)
    m += one_minus_beta1 * (g - m)
    v = beta2 * v + one_minus_beta2 * g * g
    p -= step_size * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root_correction) + eps)
    tl.store(param + at, p, mask=mask)
    tl.store(exp_avg + at, m, mask=mask)
    tl.store(exp_avg_sq + at, v, mask=mask)


@triton.jit
def _norm_kernel(grad, partial, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(grad + at, mask=at < n, other=0.0).to(tl.float64)
    tl.store(partial + tl.program_id(0), tl.sum(g * g, axis=0))
