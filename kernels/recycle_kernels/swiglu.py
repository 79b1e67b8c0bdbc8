"""SwiGLU: the gated activation of the feed-forward block.

    y = swiglu(gate, up)        # [..., F] each
    y = swiglu(packed)          # [..., 2F]: gate | up from one projection; the gradient is packed too

Formula (Shazeer 2020, arXiv:2002.05202), with s = sigmoid(gate), computed in float32 for any dtype:

    y     = gate * s * up
    dup   = dy * gate * s
    dgate = dy * up * s * (1 + gate * (1 - s))

Forward saves only its inputs. Backward recomputes the sigmoid. Inputs may have any strides, but are
copied unless they are contiguous tensors or slices of these. The result has gate's dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # elements per program; 16 per thread keep two 16-byte loads per operand in flight


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """y [..., F] from gate and up [..., F], or from both packed as [..., 2F]."""
    return _Packed.apply(gate) if up is None else _SwiGLU.apply(gate, up)


def swiglu_reference(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """`swiglu` in plain torch, differentiable."""
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    wide = gate if gate.dtype == torch.float64 else gate.float()
    return (torch.nn.functional.silu(wide) * up).to(gate.dtype)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return _forward(gate, up)

    @staticmethod
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        # Contiguous, unlike empty_like of a transposed tensor, because `_rows` would fill a copy of any other tensor.
        dgate, dup = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (gate, up))
        _backward(dy, gate, up, dgate, dup)
        return dgate, dup


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, packed):
        ctx.save_for_backward(packed)
        return _forward(*packed.chunk(2, dim=-1))

    @staticmethod
    def backward(ctx, dy):
        (packed,) = ctx.saved_tensors
        grad = torch.empty(packed.shape, dtype=packed.dtype, device=packed.device)
        _backward(dy, *packed.chunk(2, dim=-1), *grad.chunk(2, dim=-1))
        return grad


def _forward(gate: Tensor, up: Tensor) -> Tensor:
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    rows, width, (gate, up) = _rows(gate, up)
    _forward_kernel[(rows * triton.cdiv(width, BLOCK),)](
        gate, up, y, width, gate.stride(-2), up.stride(-2), BLOCK=BLOCK, num_warps=4
    )
    return y


def _backward(dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor) -> None:
    """Fill dgate and dup."""
    rows, width, (dy, gate, up, dgate, dup) = _rows(dy, gate, up, dgate, dup)
    _backward_kernel[(rows * triton.cdiv(width, BLOCK),)](
        dy, gate, up, dgate, dup, width, *(x.stride(-2) for x in (dy, gate, up, dgate, dup)), BLOCK=BLOCK, num_warps=4
    )


def _rows(*tensors: Tensor) -> tuple[int, int, list[Tensor]]:
    """Returns (rows, width, the tensors as [rows, width] with adjacent elements in a row). If all tensors are
    contiguous, there is one long row."""
    if all(x.is_contiguous() for x in tensors):
        return 1, tensors[0].numel(), [x.view(1, -1) for x in tensors]
    width = tensors[0].shape[-1]
    views = [x.reshape(-1, width) if x.stride(-1) == 1 else x.contiguous().view(-1, width) for x in tensors]
    return views[0].shape[0], width, views


@triton.jit
def _forward_kernel(gate, up, y, width, gate_stride, up_stride, BLOCK: tl.constexpr):
    row, column, mask = _block(width, BLOCK)
    g = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * width + column, (g * tl.sigmoid(g) * u).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dy, gate, up, dgate, dup, width, dy_stride, gate_stride, up_stride, dgate_stride, dup_stride, BLOCK: tl.constexpr
):
    row, column, mask = _block(width, BLOCK)
    d = tl.load(dy + row * dy_stride + column, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(dup + row * dup_stride + column, (d * g * s).to(dup.dtype.element_ty), mask=mask)
    grad = d * u * s * (1.0 + g * (1.0 - s))
    tl.store(dgate + row * dgate_stride + column, grad.to(dgate.dtype.element_ty), mask=mask)


@triton.jit
def _block(width, BLOCK: tl.constexpr):
    """(row, columns, mask) of this program: BLOCK elements of one row."""
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return row, column, column < width
