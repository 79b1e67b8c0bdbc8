"""The operations of a layer that have a kernel: the one place that picks Triton or the torch reference.

    ops = operations("auto", device)        # settings.model.kernels
    y = ops.rms_norm(x, weight, eps)        # (N, H) -> (N, H)

The references are autograd Functions with the backward written out: on a CPU every pass over memory that is saved
counts, and the gradient of a norm's weight falls out of the same pass as the gradient of its input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Operations(NamedTuple):
    """One implementation of every operation; shapes and dtypes are those of the references below."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rope_qkv: Callable[[Tensor, int, int, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    swiglu: Callable[[Tensor], Tensor]
    cross_entropy: Callable[[Tensor, Tensor], Tensor]


def operations(kernels: str, device: torch.device) -> Operations:
    """The implementation for `settings.model.kernels`: auto (triton on GPUs), triton or reference."""
    if kernels not in ("auto", "triton", "reference"):
        raise ValueError(f"model.kernels must be auto, triton or reference, not {kernels!r}")
    if kernels == "reference" or (kernels == "auto" and device.type != "cuda"):
        return REFERENCE
    import recycle_kernels as triton  # not on a CPU: the import alone costs a second

    return Operations(triton.rms_norm, triton.rope_qkv, triton.swiglu, triton.cross_entropy)


class _RMSNorm(torch.autograd.Function):
    """y = x / sqrt(mean(x^2) + eps) * w (Zhang and Sennrich 2019, arXiv:1910.07467), in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True).add_(eps))
        ctx.save_for_backward(x, scale)
        ctx.weight = weight
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, scale = ctx.saved_tensors
        unit = x * scale
        product = dy * unit
        dweight = product.sum(0)
        mean = torch.mv(product, ctx.weight).div_(x.shape[-1]).unsqueeze_(-1)
        dx = (dy * ctx.weight).sub_(unit.mul_(mean)).mul_(scale)
        return dx, dweight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (N, H) float32, weight (H,) -> (N, H)."""
    return _RMSNorm.apply(x, weight, eps)


class _RopeQKV(torch.autograd.Function):
    """Rotary positions (Su et al. 2021, arXiv:2104.09864): the pair (i, i + d/2) of a head turns by its angle.

    Takes the packed projection apart in the same pass; left to autograd, backward would fill three zeroed gradients
    of the whole projection and add them up.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int, kv_heads: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        ctx.cos, ctx.sin = cos.to(qkv.dtype), sin.to(qkv.dtype)
        turned = torch.empty_like(qkv[:, :, : heads + kv_heads], memory_format=torch.contiguous_format)
        _turn(qkv[:, :, : heads + kv_heads], ctx.cos, ctx.sin, turned)
        return turned[:, :, :heads], turned[:, :, heads:], qkv[:, :, heads + kv_heads :]

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        heads, kv_heads = dq.shape[2], dk.shape[2]
        out = dq.new_empty(*dq.shape[:2], heads + 2 * kv_heads, dq.shape[3])
        q, k, v = out.split([heads, kv_heads, kv_heads], dim=2)
        _turn(dq, ctx.cos, -ctx.sin, q)
        _turn(dk, ctx.cos, -ctx.sin, k)
        v.copy_(dv)
        return out, None, None, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)


def rope_qkv(qkv: Tensor, heads: int, kv_heads: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(q turned, k turned, v) of a packed projection (b, T, heads + 2 kv_heads, d); cos and sin (T, 1, d/2)."""
    return _RopeQKV.apply(qkv, heads, kv_heads, cos, sin)


def rope_tables(length: int, dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i/dim), each (length, 1, dim/2) float32."""
    frequency = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.outer(torch.arange(length, dtype=torch.float64), frequency).unsqueeze_(1)
    return angle.cos().float().to(device), angle.sin().float().to(device)


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up (Shazeer 2020, arXiv:2002.05202) of one matrix that holds both."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        out = torch.empty_like(gate_up)
        dgate, dup = out.chunk(2, -1)
        torch.mul(F.silu(gate), dy, out=dup)
        torch.ops.aten.silu_backward.grad_input(dy * up, gate, grad_input=dgate)
        return out


def swiglu(gate_up: Tensor) -> Tensor:
    """gate_up (N, 2 K), the gate in the first K columns -> (N, K)."""
    return _SwiGLU.apply(gate_up)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """logits (N, V), targets (N,) int64 -> the mean negative log-likelihood, a float32 scalar."""
    return F.cross_entropy(logits.float(), targets)


REFERENCE = Operations(rms_norm, rope_qkv, swiglu, cross_entropy)
