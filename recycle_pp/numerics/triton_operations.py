"""The operations of a stage in Triton. `operations` documents them, and `recycle_kernels` contains the kernels.

The operations need a GPU. With TRITON_INTERPRET=1 tests run them on a CPU, in float32.
"""

from __future__ import annotations

from functools import partial

import recycle_kernels as kernels
import torch
from recycle_kernels import Chunks, rope_qkv, swiglu
from torch import Tensor

from recycle_pp.config.settings import Optimizer

from .layout import Layout
from .operations import AdamWState
from .weight_grad_store import WeightGradStore

__all__ = [
    "accumulate",
    "accumulate_product",
    "adamw",
    "add_product",
    "add_rms_norm",
    "head_loss",
    "places",
    "restore",
    "rope_qkv",
    "squared_norms",
    "swiglu",
]


def add_rms_norm(x: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    if branch is None:
        return kernels.rms_norm_keeping(x, weight, eps, dtype=dtype)
    return kernels.add_rms_norm(branch, x, weight, eps, dtype=dtype)


def head_loss(x: Tensor, weight: Tensor, targets: Tensor, sink: WeightGradStore | None, index: int) -> Tensor:
    if sink is None:
        return kernels.head_loss(x, weight, targets)
    gradients = sink.gradients
    return kernels.head_loss(
        x, weight, targets, defer=lambda later: sink.put(lambda i: later(partial(gradients.add_product, i)), index)
    )


def add_product(total: Tensor, dy: Tensor, x: Tensor, first: bool) -> None:
    kernels.weight_grad(total, dy, x, first=first)


def accumulate(total: Tensor, grad: Tensor, e: Tensor, limit: float, bad: Tensor, first: bool) -> None:
    kernels.quantise_add(total, grad.contiguous(), e, limit, bad, first)


def accumulate_product(total: Tensor, dy: Tensor, x: Tensor, e: Tensor, limit: float, bad: Tensor, first: bool) -> None:
    kernels.weight_grad_fixed(total, dy, x, e, limit, bad, first=first)


def restore(total: Tensor, e: Tensor, out: Tensor) -> None:
    kernels.dequantise(total, e, out)


def places(layout: Layout, device: torch.device) -> Chunks:
    decayed = [len(layout.shapes[unit.tensor]) >= 2 for unit in layout.units]
    return kernels.make_chunks(layout.unit_sizes, decayed, device)


def squared_norms(flat: Tensor, places: Chunks) -> Tensor:
    return kernels.squared_norms(flat, places)


def adamw(
    state: AdamWState,
    grad: Tensor,
    places: Chunks,
    o: Optimizer,
    *,
    lr: float,
    step: int,
    scale: float,
    undo: AdamWState | None,
) -> None:
    hyper = kernels.AdamW(lr, o.beta1, o.beta2, o.eps, o.weight_decay)
    with torch.cuda.device_of(grad):  # a joining worker updates in another thread, and a new thread defaults to GPU 0
        kernels.adamw(state, grad, places, hyper, step + 1, scale, undo)
