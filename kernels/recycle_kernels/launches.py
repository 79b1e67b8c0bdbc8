"""Every kernel launch of a stage, once each, at the stage's shapes.

    for call in launches(StageShape(...), device).values(): call()

`compile.py` runs them on meta tensors to compile for GPUs that are not present. The trainer does not use the list: it
warms up by running a micro-batch of zeros through its own stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .adamw import AdamW, adamw, make_chunks, squared_norms
from .fixed_point import dequantise, quantise_add
from .head_loss import cross_entropy, head_loss
from .rms_norm import add_rms_norm, rms_norm
from .rope import rope, rope_qkv, rope_table
from .swiglu import swiglu
from .weight_grad import weight_grad, weight_grad_fixed


@dataclass(frozen=True)
class StageShape:
    """The shapes of a stage for one micro-batch of `batch` samples."""

    batch: int
    sequence: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int = 0  # 0: the stage has no head
    parameters: int = 1 << 20  # number of parameters, for the optimizer's launch
    dtype: torch.dtype = torch.bfloat16  # dtype of the matrices; the residual stream is float32

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    def products(self) -> list[tuple[int, int, int]]:
        """(O, K, T) of every weight gradient: qkv, attention output, gate and up, down, head."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        sizes = [(qkv, self.width), (self.width, self.width), (2 * self.ffn, self.width), (self.width, self.ffn)]
        return [(o, k, self.tokens) for o, k in [*sizes, *([(self.vocabulary, self.width)] if self.vocabulary else [])]]


def launches(shape: StageShape, device: torch.device) -> dict[str, Callable[[], None]]:
    """Returns kernel name -> function that launches it with the sizes of `shape`. Inputs are zeros, so indices are
    valid. On the device `meta` the launches allocate nothing."""

    def zeros(*size: int, dtype: torch.dtype = shape.dtype, grad: bool = False) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=device, requires_grad=grad)

    wide, tokens, width = torch.float32, shape.tokens, shape.width

    def norm() -> None:
        x, weight = zeros(tokens, width, dtype=wide, grad=True), zeros(width, dtype=wide, grad=True)
        _backward(rms_norm(x, weight, dtype=shape.dtype))

    def norm_residual() -> None:
        x, residual = zeros(tokens, width, grad=True), zeros(tokens, width, dtype=wide, grad=True)
        _backward(*add_rms_norm(x, residual, zeros(width, dtype=wide, grad=True)))

    def positions() -> None:
        table = rope_table(shape.sequence, shape.head_dim, device=device)
        heads, kv = shape.heads, shape.kv_heads
        qkv = zeros(shape.batch, shape.sequence, heads + 2 * kv, shape.head_dim, grad=True)
        _backward(*rope_qkv(qkv, heads, kv, *table))
        _backward(rope(qkv[:, :, : heads + kv], *table))

    def activation() -> None:
        _backward(swiglu(zeros(tokens, 2 * shape.ffn, grad=True)))
        _backward(swiglu(zeros(tokens, shape.ffn, grad=True), zeros(tokens, shape.ffn, grad=True)))

    def products() -> None:
        for o, k, t in shape.products():
            for first in (True, False):
                weight_grad(zeros(o, k, dtype=wide), zeros(t, o), zeros(t, k), first=first)
                q, bad = zeros(o, k, dtype=torch.int64), zeros(2, dtype=torch.float64)
                weight_grad_fixed(q, zeros(t, o), zeros(t, k), zeros(o, dtype=torch.int32), 2.0**58, bad, first=first)

    def head() -> None:
        x, weight = zeros(tokens, width, grad=True), zeros(shape.vocabulary, width, dtype=wide, grad=True)
        targets = zeros(tokens, dtype=torch.int64)
        _backward(head_loss(x, weight, targets))
        _backward(head_loss(x, weight, targets, defer=lambda later: later(add)))
        _backward(cross_entropy(zeros(tokens, shape.vocabulary, grad=True), targets))

    def add(dl: Tensor, x: Tensor, parts: int) -> None:
        weight_grad(zeros(dl.shape[1], x.shape[1], dtype=wide), dl, x)

    def fixed_point() -> None:
        q, exponents = zeros(shape.parameters, dtype=torch.int64), zeros(shape.parameters // width, dtype=torch.int32)
        for dtype in {wide, shape.dtype}:
            for first in (True, False):
                grad = zeros(shape.parameters, dtype=dtype)
                quantise_add(q, grad, exponents, 2.0**58, zeros(2, dtype=torch.float64), first=first)
        dequantise(q, exponents, zeros(shape.parameters, dtype=wide))

    def optimizer() -> None:
        chunks, n = make_chunks([shape.parameters], [True], device), shape.parameters
        grad = zeros(n, dtype=wide)
        squared_norms(grad, chunks)
        for kind in (wide, torch.bfloat16):
            state, undo = ((zeros(n, dtype=wide), zeros(n, dtype=kind), zeros(n, dtype=kind)) for _ in range(2))
            step = partial(adamw, state, grad, chunks, AdamW(lr=0.0), step=1)
            step()
            step(undo=undo)

    named = [norm, norm_residual, positions, activation, products, fixed_point, optimizer]
    return {call.__name__: call for call in ([*named, head] if shape.vocabulary else named)}


def _backward(*outputs: Tensor) -> None:
    torch.autograd.backward(outputs, [torch.zeros_like(y) for y in outputs])
