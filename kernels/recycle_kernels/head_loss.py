"""Fused head projection and cross-entropy, without materialising all logits of a micro-batch.

    loss = head_loss(x, weight, targets)                 # x [N, H], weight [V, H], targets [N] int64 -> float32 scalar
    loss = head_loss(x, weight, targets, defer=defer)    # deferred weight gradient: backward calls defer(later)
    later(add)                                           # the op W: calls add(dl, x, parts) once for each chunk
    loss = cross_entropy(logits, targets)                # for existing logits [N, V]

Formula, for row i with logits l = x_i W^T (rounded to x's dtype, as torch does) and target t:

    lse    = log sum exp(l)                  loss = sum over the rows of (lse - l_t) / n
    dl     = (exp(l - lse) - onehot(t)) / n
    dx     = dl W                            dW   = dl^T x

n is the number of rows whose target is not IGNORED. The other rows have no loss and no gradient. If n is 0, the loss is
NaN, as in torch.

Rows are processed in chunks: project, convert the logits to dl in place, multiply, discard. This is the method of
Liger-Kernel's fused linear cross-entropy (Hsu et al. 2024, arXiv:2410.10989). Forward also computes dx, because the
logits exist at that time, and backward only scales dx. Without `defer`, forward computes dW as well. This takes three
matrix products of size N V H. With `defer`, the op W repeats the projection and computes dl from it, targets and lse.
This takes four products, but keeps no logits until the op W. `add` accumulates dl^T x into the caller's gradient
(`weight_grad`). Its argument `parts` is the number of all chunks.

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

IGNORED = -100  # target of a row without a loss

Add = Callable[[Tensor, Tensor, int], None]  # (dl [rows, V], x [rows, H] of a chunk, number of chunks): adds dl^T x
Defer = Callable[[Callable[[Add], None]], None]  # receives the function `later`, which computes dW

CHUNK_BYTES = 512 << 20  # large, because every chunk reads and writes dW (8 V H bytes), but small next to a large dW


def head_loss(x: Tensor, weight: Tensor, targets: Tensor, defer: Defer | None = None) -> Tensor:
    """The mean negative log-likelihood of the targets, a float32 scalar.

    defer: if not None, backward does not compute dW. Instead it calls defer(later), and later(add) computes dW.

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
        if dw is not None:  # one op multiplies and rounds, without a second float32 tensor of V H elements
            dw = torch.mul(dw, dloss, out=torch.empty_like(dw, dtype=weight.dtype))
        return dx, dw, None, None


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets):
        logits = logits.contiguous()
        nll, lse = _losses(logits, targets)
        ctx.share = _share(targets)
        ctx.save_for_backward(logits, targets, lse)
        return nll.mean() * ctx.share

    @staticmethod
    def backward(ctx, dloss):
        logits, targets, lse = ctx.saved_tensors
        return _logit_grads(logits, torch.empty_like(logits), targets, lse, dloss, ctx.share, 1.0 / len(targets)), None


def _add_products(add: Add, x: Tensor, weight: Tensor, targets: Tensor, lse: Tensor, dloss: Tensor) -> None:
    """Run the op W: pass dl, multiplied by dloss, and x of every chunk to `add`. dl is computed from a repeated
    projection and from the `lse` [N] that forward has saved."""
    x, weight = x.contiguous(), weight.to(x.dtype)
    chunks, share = _chunks(x, weight), _share(targets)
    for rows in chunks:
        logits = x[rows] @ weight.T
        _logit_grads(logits, logits, targets[rows], lse[rows], dloss, share, 1.0 / len(x))
        add(logits, x[rows], len(chunks))


def _forward(x: Tensor, weight: Tensor, targets: Tensor, want_x: bool, want_weight: bool):
    """Returns (loss, lse, dx, dW), with the gradients for dloss = 1, or None for a gradient that is not wanted."""
    x, weight = x.contiguous(), weight.to(x.dtype)
    nll, lse = (torch.empty(len(x), dtype=torch.float32, device=x.device) for _ in range(2))
    share = _share(targets)
    dx = torch.empty_like(x) if want_x else None
    dw = torch.empty(weight.shape, dtype=torch.float32, device=x.device) if want_weight else None
    for rows in _chunks(x, weight):
        logits = x[rows] @ weight.T
        nll[rows], lse[rows] = _losses(logits, targets[rows])
        if want_x or want_weight:
            _logit_grads(logits, logits, targets[rows], lse[rows], None, share, 1.0 / len(x))
        if dx is not None:
            torch.mm(logits, weight, out=dx[rows])
        if dw is not None:
            weight_grad(dw, logits, x[rows], first=rows.start == 0)
    return nll.mean() * share, lse, dx, dw


def _share(targets: Tensor) -> Tensor:
    """Number of rows divided by the number of rows with a loss, a float32 scalar. It is exactly 1 if no target is
    ignored, so multiplying the mean over all rows by it then changes no bit."""
    return len(targets) / (targets != IGNORED).sum(dtype=torch.float32)


def _chunks(x: Tensor, weight: Tensor) -> list[slice]:
    rows = max(1, CHUNK_BYTES // (weight.shape[0] * x.element_size()))
    rows = min(len(x), max(128, rows // 128 * 128))
    return [slice(start, min(start + rows, len(x))) for start in range(0, len(x), rows)]


def _losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (negative log-likelihood, lse) of every row, float32 [rows] each. The first is 0 in a row with an ignored
    target."""
    rows, vocabulary = logits.shape
    nll, lse = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    _loss_kernel[(rows,)](logits, targets, nll, lse, vocabulary, **_launch(vocabulary))
    return nll, lse


def _logit_grads(
    logits: Tensor, out: Tensor, targets: Tensor, lse: Tensor, dloss: Tensor | None, share: Tensor, scale: float
) -> Tensor:
    """Fill `out`, which may be `logits`, with scale * share * dloss * (softmax(logits) - onehot(targets)). Return it.
    Rows with an ignored target get 0."""
    rows, vocabulary = logits.shape
    _grad_kernel[(rows, triton.cdiv(vocabulary, _launch(vocabulary)["BLOCK"]))](
        logits, out, targets, lse, dloss, share, vocabulary, scale, **_launch(vocabulary)
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
    counts = target >= 0
    tl.store(lse + row, result)
    tl.store(nll + row, tl.where(counts, result - tl.load(logits + target, mask=counts, other=0.0).to(tl.float32), 0.0))


@triton.jit
def _grad_kernel(logits, out, targets, lse, dloss, share, vocabulary, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row * vocabulary + column
    mask = column < vocabulary
    l = tl.load(logits + at, mask=mask, other=float("-inf")).to(tl.float32)
    target = tl.load(targets + row)
    grad = tl.exp(l - tl.load(lse + row)) - tl.where(column == target, 1.0, 0.0)
    scale *= tl.load(share)
    if dloss is not None:
        scale *= tl.load(dloss)
    grad = tl.where(target >= 0, grad * scale, 0.0)  # 0 even if all targets are ignored and the share is infinite
    tl.store(out + at, grad.to(out.dtype.element_ty), mask=mask)
