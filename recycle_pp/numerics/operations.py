"""The computation of a stage except matrix products and attention: one interface with two backends.

    ops = operations(settings.model.kernels, device)    # auto (triton on GPUs) | triton | reference
    y, h = ops.add_rms_norm(x, branch, weight, eps)

A backend is a module with the functions of `Operations`: `torch_operations`, or `triton_operations` with the kernels of
`recycle_kernels`. The rest of the trainer does not depend on the choice.

The results of the two backends may differ slightly, because they round in a different order. Under bf16 there is a
second difference: Triton keeps weight gradients in float32, while torch rounds each product to bf16. With the same
backend, equal devices and equal library versions give bit-identical results. `execution.device.platform` names devices
and versions; it is the same on all workers of a job.

Every function is deterministic, and its launches depend on shapes and dtypes alone. If torch's own operations are
deterministic too (on a GPU with `numerics.reproducible`), a micro-batch has the same gradient on any peer. Then the op
`I` (backward for the input) followed by `W` (backward for the weights) also gives the same bits as `B` (both in one).
The fixed-point functions round each addend once and sum exactly. Equal addends thus give equal sums in any order, on
both backends.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from recycle_pp.config.settings import Optimizer

from .layout import Layout
from .weight_grad_store import WeightGradStore

# parameters (float32), mean gradients, mean squared gradients (both float32 or bfloat16); flat
AdamWState = tuple[Tensor, Tensor, Tensor]


class Operations(Protocol):
    """The interface of a backend.

    In the functions that sum, `first` means that the sum is still empty. The function then overwrites it without
    reading it.
    """

    # --- layers, differentiable

    def add_rms_norm(self, x: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(y, h): h = x + branch, or x without a branch, is the new residual stream; y = h / rms(h) * weight.

        x (N, H) float32 or bfloat16, branch (N, H) of any float dtype, weight (H,) float32. y has the dtype of the next
        matrix product (the autocast dtype, or the dtype of x). h has the dtype of x.
        """
        ...

    def rope_qkv(self, qkv: Tensor, heads: int, kv_heads: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """(rotated q, rotated k, v) of a packed projection (b, T, heads + 2 kv_heads, d); cos and sin (T, 1, d/2)."""
        ...

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """gate_up (N, 2 K), the gate in the first K columns -> silu(gate) * up (N, K)."""
        ...

    def head_loss(self, x: Tensor, weight: Tensor, targets: Tensor, sink: WeightGradStore | None, index: int) -> Tensor:
        """x (N, H), weight (V, H), targets (N,) int64 -> the mean negative log-likelihood, a float32 scalar.

        A target of -100 has no loss and no gradient. If all targets are -100, the mean is NaN and all gradients are 0.

        The weight's gradient goes to the sink, as the gradient of tensor `index`. Without a sink it goes to autograd.
        """
        ...

    # --- sums over micro-batches, in place

    def add_product(self, total: Tensor, dy: Tensor, x: Tensor, first: bool) -> None:
        """total (O, K) float32 += dy^T x; dy (N, O), x (N, K), both float32 or bfloat16."""
        ...

    def accumulate(self, total: Tensor, grad: Tensor, e: Tensor, limit: float, bad: Tensor, first: bool) -> None:
        """total (int64 or int32) += round(grad 2^e), half to even. Does not change `grad`.

        grad: float32 or bfloat16, as many elements as total
        e: int32 (rows,), an exponent for each row of the tensor (rows as in `layout`)
        limit: bound for each addend, in quanta
        bad: (2,) float64. bad[0] becomes positive if an element reaches `limit`, is NaN or is infinite; total is then
            invalid. bad[1] becomes positive if an element is NaN or infinite.
        """
        ...

    def accumulate_product(
        self, total: Tensor, dy: Tensor, x: Tensor, e: Tensor, limit: float, bad: Tensor, first: bool
    ) -> None:
        """total (O, K) int64 or int32 += round(dy^T x 2^e). See `accumulate`."""
        ...

    def restore(self, total: Tensor, e: Tensor, out: Tensor) -> None:
        """out (float32) = total 2^-e, rounded once."""
        ...

    # --- the end of a step

    def places(self, layout: Layout, device: torch.device) -> Any:
        """The layout in the form that `squared_norms` and `adamw` take. Compute it once."""
        ...

    def squared_norms(self, flat: Tensor, places: Any) -> Tensor:
        """The squared norm of every unit in `flat`: (units,) float64, finite if and only if all elements are."""
        ...

    def adamw(
        self,
        state: AdamWState,
        grad: Tensor,
        places: Any,
        o: Optimizer,
        *,
        lr: float,
        step: int,
        scale: float,
        undo: AdamWState | None,
    ) -> None:
        """One AdamW step, number `step` from 0, with the gradient times `scale`. Decays matrices, not vectors.

        Computes in float32. bfloat16 moments are rounded to nearest even when they are stored.

        undo: receives a copy of the state before the step
        """
        ...
