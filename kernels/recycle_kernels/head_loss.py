"""Fused head projection and cross-entropy, without materialising all logits of a micro-batch.

    loss = head_loss(x, weight, targets)                 # x [N, H], weight [V, H], targets [N] int64 -> float32 scalar
    loss = head_loss(x, weight, targets, defer=defer)    # deferred weight gradient: backward calls defer(later)
    later(add)                                           # the op W: calls add(dl, x, parts) for each of `parts` chunks
    loss = cross_entropy(logits, targets)                # for existing logits [N, V]

Formula, for row n with logits l = x_n W^T (rounded to x's dtype, as torch does) and target t:

    lse    = log sum exp(l)                  loss = mean over N of (lse - l_t)
    dl     = (exp(l - lse) - onehot(t)) / N
    dx     = dl W                            dW   = dl^T x

Rows are processed in chunks: project, convert the logits to dl in place, multiply, discard. This is the method of
Liger-Kernel's fused linear cross-entropy (Hsu et al. 2024, arXiv:2410.10989). Forward also computes dx, because the
logits exist at that time, and backward only scales dx. Without `defer`, forward computes dW as well (3 products of
N V H in total). With `defer`, the op W repeats the projection from (x, targets, lse), so that no tensor of size V has
to be kept (4 products). `add` accumulates dl^T x into the caller's gradient (`weight_grad`).

A chunk has at most CHUNK_BYTES of logits. Chunks depend on the shape only, so all peers sum in the same order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from .blocks import power_of_two
from .weight_grad import weight_grad

Add = Callable[[Tensor, Tensor, int], None]  # (dl [n, V], x [n, H], parts): adds dl^T x for one of `parts` chunks
Defer = Callable[[Callable[[Add], None]], None]

CHUNK_BYTES = 512 << 20  # large, because every chunk reads and writes dW (8 V H bytes), but small beside a large dW


def head_loss(x: Tensor, weight: Tensor, targets: Tensor, defer: Defer | None = None) -> Tensor:
    """The mean negative log-likelihood of the targets, a float32 scalar.

    defer: if given, backward does not compute dW, but calls `defer` with a function that does.

    Products use x's dtype, or the autocast dtype under autocast, like torch's linear layer."""
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or defer is not None):
        return _HeadLoss.apply(x, weight, targets, defer)
    return _forward(x, weight, targets, want_x=False, want_weight=False)[0]


def head_loss_reference(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """`head_loss` in plain torch, differentiable. Materialises all logits."""
    return cross_entropy_reference(x @ weight.to(x.dtype).T, targets)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean negative log-likelihood for logits [N, V], a float32 scalar. Makes no float32 copy of the logits."""
    return _CrossEntropy.apply(logits, targets)


def cross_entropy_reference(logits: Tensor, targets: Tensor) -> Tensor:
    """`cross_entropy` in plain torch, differentiable."""
    return torch.nn.functional.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), targets)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, defer):
        want_x, want_weight = ctx.needs_input_grad[:2]
        loss, lse, dx, dw = _forward(x, weight, targets, want_x, want_weight and defer is None)
        ctx.save_for_backward(x, targets, lse, dx, dw)
        ctx.weight, ctx.defer = weight, defer
        return loss

    @staticmethod
    def backward(ctx, dloss):
        x, targets, lse, dx, dw = ctx.saved_tensors
        weight, defer = ctx.weight, ctx.defer
        if defer is not None:
            defer(lambda add: _add_products(add, x, weight, targets, lse, dloss))
        dx = None if dx is None else (dx * dloss).to(x.dtype)
        if dw is not None:  # multiply and round in one op: no second float32 tensor of V H elements
            dw = torch.mul(dw, dloss, out=torch.empty_like(dw, dtype=weight.dtype))
        return dx, dw, None, None


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets):
        logits = logits.contiguous()
        nll, lse = _losses(logits, targets)
        ctx.save_for_backward(logits, targets, lse)
        return nll.mean()

    @staticmethod
    def backward(ctx, dloss):
        logits, targets, lse = ctx.saved_tensors
        return _logit_grads(logits, torch.empty_like(logits), targets, lse, dloss, 1.0 / len(targets)), None


def _add_products(add: Add, x: Tensor, weight: Tensor, targets: Tensor, lse: Tensor, dloss: Tensor) -> None:
    """The op W: pass dl and x of every chunk to `add`, with dl multiplied by dloss. Projects again, and uses the lse
    [N] of the forward."""
    x, weight = x.contiguous(), weight.to(x.dtype)
    chunks = _chunks(x, weight)
    for rows in chunks:
        logits = x[rows] @ weight.T
        _logit_grads(logits, logits, targets[rows], lse[rows], dloss, 1.0 / len(x))
        add(logits, x[rows], len(chunks))


def _forward(x: Tensor, weight: Tensor, targets: Tensor, want_x: bool, want_weight: bool):
    """(loss, lse, dx or None, dW or None), with the gradients for dloss = 1."""
    x, weight = x.contiguous(), weight.to(x.dtype)
    nll, lse = (torch.empty(len(x), dtype=torch.float32, device=x.device) for _ in range(2))
    dx = torch.empty_like(x) if want_x else None
    dw = torch.empty(weight.shape, dtype=torch.float32, device=x.device) if want_weight else None
    for rows in _chunks(x, weight):
        logits = x[rows] @ weight.T
        nll[rows], lse[rows] = _losses(logits, targets[rows])
        if want_x or want_weight:
            _logit_grads(logits, logits, targets[rows], lse[rows], None, 1.0 / len(x))
        if dx is not None:
            torch.mm(logits, weight, out=dx[rows])
        if dw is not None:
            weight_grad(dw, logits, x[rows], first=rows.start == 0)
    return nll.mean(), lse, dx, dw


def _chunks(x: Tensor, weight: Tensor) -> list[slice]:
    rows = max(1, CHUNK_BYTES // (weight.shape[0] * x.element_size()))
    rows = min(len(x), max(128, rows // 128 * 128))
    return [slice(start, min(start + rows, len(x))) for start in range(0, len(x), rows)]


def _losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(negative log-likelihood, lse) of every row, float32."""
    rows, vocabulary = logits.shape
    nll, lse = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    _loss_kernel[(rows,)](logits, targets, nll, lse, vocabulary, **_launch(vocabulary))
    return nll, lse


def _logit_grads(
    logits: Tensor, out: Tensor, targets: Tensor, lse: Tensor, dloss: Tensor | None, scale: float
) -> Tensor:
    """out (may be logits) = scale * dloss * (softmax(logits) - onehot(targets))."""
    rows, vocabulary = logits.shape
    _grad_kernel[(rows, triton.cdiv(vocabulary, _launch(vocabulary)["BLOCK"]))](
        logits, out, targets, lse, dloss, vocabulary, scale, **_launch(vocabulary)
    )
    return out


def _launch(vocabulary: int) -> dict[str, int]:
    block = min(power_of_two(vocabulary), 8192)
    return {"BLOCK": block, "num_warps": max(4, block // 512)}


@triton.jit
def _loss_kernel(logits, targets, nll, lse, vocabulary, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    # each lane keeps a running maximum and sum (Milakov and Gimelshein 2018, arXiv:1805.02867), reduced at the end
    peak = tl.full([BLOCK], -3.0e38, tl.float32)  # finite, because -inf - -inf is NaN
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        l = tl.load(logits + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
        new = tl.maximum(peak, l)
        total = total * tl.exp(peak - new) + tl.exp(l - new)
        peak = new
    top = tl.max(peak, axis=0)
    result = top + tl.log(tl.sum(total * tl.exp(peak - top), axis=0))
    target = tl.load(targets + row)
    tl.store(lse + row, result)
    tl.store(nll + row, result - tl.load(logits + target).to(tl.float32))


@triton.jit
def _grad_kernel(logits, out, targets, lse, dloss, vocabulary, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row * vocabulary + column
    mask = column < vocabulary
    l = tl.load(logits + at, mask=mask, other=float("-inf")).to(tl.float32)
    grad = tl.exp(l - tl.load(lse + row)) - tl.where(column == tl.load(targets + row), 1.0, 0.0)
    if dloss is not None:
        scale *= tl.load(dloss)
    tl.store(out + at, (grad * scale).to(out.dtype.element_ty), mask=mask)
