"""Compiles every kernel that a stage will launch, before the first collective.

    for name, seconds in warm(StageShape(...), device): log(name, seconds)

A cold compile in the middle of a step looks like a hang to the peers, so a worker does this at its start, under its
lease. Each function is called once, forward and backward, on zeros of the real shape: what is compiled is exactly
what will be launched, and the matrix libraries choose their algorithms too. `compile.py` makes the same calls on
tensors without memory to compile for GPUs that are not here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .adamw import adamw, make_chunks, squared_norm
from .fixed_point import dequantise, quantise_add
from .head_loss import cross_entropy, head_loss
from .rms_norm import add_rms_norm, rms_norm
from .rope import rope, rope_qkv, rope_table
from .swiglu import swiglu
from .weight_grad import Tiles, weight_grad, weight_grad_fixed


@dataclass(frozen=True)
class StageShape:
    """What a stage multiplies: one micro-batch of `batch` samples."""

    batch: int
    sequence: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int = 0  # 0: this stage has no head
    parameters: int = 1 << 20  # of the stage; the optimizer's launch
    dtype: torch.dtype = torch.bfloat16  # of the matrices; the residual stream is float32

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


def warm(shape: StageShape, device: torch.device | str, tiles: Tiles | None = None) -> Iterator[tuple[str, float]]:
    """(name, seconds) of each kernel's first call. The memory it took is given back at the end."""
    for name, call in calls(shape, torch.device(device), tiles).items():
        began = time.perf_counter()
        call()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
        yield name, time.perf_counter() - began
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def calls(shape: StageShape, device: torch.device, tiles: Tiles | None = None) -> dict[str, Callable[[], None]]:
    """Every launch of a stage by name. Zeros, so that indices are valid; on `meta` nothing is allocated."""

    def zeros(*size: int, dtype: torch.dtype = shape.dtype, grad: bool = False) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=device, requires_grad=grad)

    wide, tokens, width = torch.float32, shape.tokens, shape.width

    def norm() -> None:
        y = rms_norm(zeros(tokens, width, dtype=wide, grad=True), zeros(width, dtype=wide, grad=True))
        _backward(y)

    def norm_residual() -> None:
        x, residual = zeros(tokens, width, grad=True), zeros(tokens, width, dtype=wide, grad=True)
        weight = zeros(width, dtype=wide, grad=True)
        _backward(*add_rms_norm(x, residual, weight))
        queue: list[Callable[[Tensor], None]] = []
        _backward(*add_rms_norm(x, residual, weight, defer=lambda _, add: queue.append(add)))
        queue[0](zeros(width, dtype=wide))

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
            weight_grad(zeros(o, k, dtype=wide), zeros(t, o), zeros(t, k), tiles)
            bad = zeros(dtype=torch.float64)
            weight_grad_fixed(zeros(o, k, dtype=torch.int64), zeros(t, o), zeros(t, k), 40, 16, bad, tiles)

    def head() -> None:
        x, weight = zeros(tokens, width, grad=True), zeros(shape.vocabulary, width, dtype=wide, grad=True)
        targets = zeros(tokens, dtype=torch.int64)
        _backward(head_loss(x, weight, targets))
        queue: list[Callable[[Tensor], None]] = []
        _backward(head_loss(x, weight, targets, defer=lambda _, add: queue.append(add)))
        queue[0](zeros(shape.vocabulary, width, dtype=wide))
        _backward(cross_entropy(zeros(tokens, shape.vocabulary, grad=True), targets))

    def fixed_point() -> None:
        for dtype in {wide, shape.dtype}:
            q, grad = zeros(shape.parameters, dtype=torch.int64), zeros(shape.parameters, dtype=dtype)
            quantise_add(q, grad, 40, 16, zeros(dtype=torch.float64))
            dequantise(q, 40)

    def optimizer() -> None:
        param, grad, mean, square, *undo = (zeros(shape.parameters, dtype=wide) for _ in range(7))
        squared_norm(grad)
        chunks, clip = make_chunks([shape.parameters], [True], device), zeros(dtype=wide)
        adamw(param, grad, mean, square, chunks, step=1, lr=0.0, clip=clip)
        adamw(param, grad, mean, square, chunks, step=1, lr=0.0, clip=clip, undo=(undo[0], undo[1], undo[2]))

    named = [norm, norm_residual, positions, activation, products, fixed_point, optimizer]
    return {call.__name__: call for call in ([*named, head] if shape.vocabulary else named)}


def _backward(*outputs: Tensor) -> None:
    torch.autograd.backward(outputs, [torch.zeros_like(y) for y in outputs])
