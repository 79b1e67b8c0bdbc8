"""What a stage computes beside matrix products and attention: one interface, two backends, picked by one config value.

    ops = operations(settings.model.kernels, device)    # auto (triton on GPUs) | triton | reference
    y, h = ops.add_rms_norm(x, branch, weight, eps)

A backend is a module with the functions of `Operations`: `torch_operations`, or `triton_operations` with the kernels of
`recycle_kernels`. Nothing else in the trainer knows which of them it has.

Which bits may differ. Between the backends: those that rounding in another order gives, in values and gradients (under
bf16 Triton also keeps weight gradients in float32, where torch rounds each product to bf16). Within a backend,
on equal devices and library versions (`execution.device.platform`, equal on all workers of a job): none. Every function
is deterministic, and what it launches depends on shapes and dtypes alone. Where torch's own operations are so too (on a
GPU with `numerics.reproducible`) a micro-batch has the same gradient on any peer, and I then W has the bits of B. The
fixed-point functions (int64) are exact sums of addends rounded once: equal addends give equal sums, in any order, on
either backend.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from recycle_pp.config.settings import Optimizer

from .layout import Layout
from .weight_grad_store import WeightGradStore

State = tuple[Tensor, Tensor, Tensor]  # parameters, their mean gradient, their mean squared gradient; flat float32


class Operations(Protocol):
    """`first` says that a sum is empty: it is written, and what its memory held does not matter."""

    # --- layers, differentiable

    def add_rms_norm(self, x: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(y, h): h = x + branch (x without one) goes on as the residual stream, y = h / rms(h) * weight.

        x (N, H) float32 or bfloat16, branch (N, H) of any float dtype, weight (H,) float32 -> y in the dtype that the
        next matrix product may want (x's or that of autocast), h in x's.
        """
        ...

    def rope_qkv(self, qkv: Tensor, heads: int, kv_heads: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """(q turned, k turned, v) of a packed projection (b, T, heads + 2 kv_heads, d); cos and sin (T, 1, d/2)."""
        ...

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """gate_up (N, 2 K), the gate in the first K columns -> silu(gate) * up (N, K)."""
        ...

    def head_loss(self, x: Tensor, weight: Tensor, targets: Tensor, sink: WeightGradStore | None, index: int) -> Tensor:
        """x (N, H), weight (V, H), targets (N,) int64 -> the mean negative log-likelihood, a float32 scalar.

        The gradient of the weight goes to the sink as that of tensor `index`; without one to autograd.
        """
        ...

    # --- sums over micro-batches, in place

    def add_product(self, total: Tensor, dy: Tensor, x: Tensor, first: bool) -> None:
        """total (O, K) float32 += dy^T x; dy (N, O), x (N, K), both float32 or bfloat16."""
        ...

    def accumulate(self, total: Tensor, grad: Tensor, e: Tensor, limit: float, bad: Tensor, first: bool) -> None:
        """total (int64 or int32) += round(grad 2^e), half to even; `grad` (float32 or bfloat16, equal size) stays as it
        is.

        e: int32 (rows,), of every row of the tensor, the rows as `layout` sees them.
        `bad` (2,) float64: the first rises if an element is not below `limit` steps, NaN or infinite (total is void
        then), the second if one is NaN or infinite.
        """
        ...

    def accumulate_product(
        self, total: Tensor, dy: Tensor, x: Tensor, e: Tensor, limit: float, bad: Tensor, first: bool
    ) -> None:
        """total (O, K) int64 or int32 += round(dy^T x 2^e), as `accumulate`."""
        ...

    def restore(self, total: Tensor, e: Tensor, out: Tensor) -> None:
        """out (float32) = total 2^-e, rounded once."""
        ...

    # --- the end of a step

    def places(self, layout: Layout, device: torch.device) -> Any:
        """What the two below want to know of the layout, made once."""
        ...

    def squared_norms(self, flat: Tensor, places: Any) -> Tensor:
        """The squared norm of every block in `flat`: (blocks,) float64, finite exactly if the elements are."""
        ...

    def adamw(
        self,
        state: State,
        grad: Tensor,
        places: Any,
        o: Optimizer,
        *,
        lr: float,
        step: int,
        scale: float,
        undo: State | None,
    ) -> None:
        """One step, number `step` from 0, with the gradient times `scale`. Matrices decay, vectors do not.

        undo: receives the state as it was.
        """
        ...
