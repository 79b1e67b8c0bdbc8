"""Compares the kernels with eager torch, torch.compile and Liger-Kernel on one GPU.

    pip install liger-kernel                              # optional; without it, its column is missing
    python bench/kernels.py                               # every kernel, bfloat16, shapes of a 4096-wide model
    python bench/kernels.py --only weight_grad head_loss
    TRITON_INTERPRET=1 python bench/kernels.py            # without a GPU: compares values once, on tiny shapes

The bench first measures the machine's rates in a large copy and in a large bfloat16 product. Then it prints for each
kernel:

- the median milliseconds of each candidate, with the L2 cache flushed between runs;
- our rate as a share of the machine's rate, computed from the necessary bytes or flops and our time;
- our speed relative to the best other candidate;
- the relative difference between our values and eager's.

`weight_grad` also tries every tile and names the fastest, for the table of the kernel.

(This file is long because it has a function for each kernel and its competitors.)
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import recycle_kernels as rk
import torch
import torch._functorch.config
import triton
from case import DEVICE, GPU, Case, listed, machine, measure, milliseconds
from torch import Tensor
from torch.nn import functional as F

DTYPE = torch.bfloat16 if GPU else torch.float32
try:
    from liger_kernel.transformers import functional as liger
except ImportError:
    liger = None

TILES = [
    rk.Tile(64, 64, 64),
    rk.Tile(64, 128, 64, warps=4, stages=4),
    rk.Tile(128, 128, 32, warps=8, stages=4),
    rk.Tile(128, 128, 64, warps=8),
    rk.Tile(128, 128, 64, warps=8, stages=4),
    rk.Tile(128, 256, 32, warps=8, stages=4),
    rk.Tile(128, 256, 64, warps=8),
    rk.Tile(128, 256, 64, warps=8, stages=4),
    rk.Tile(256, 128, 64, warps=8),
]


@dataclass
class Shape:
    """A layer of Llama-3-8B at 16384 tokens. `tiny` is for runs without a GPU."""

    batch: int = 4
    sequence: int = 4096
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    ffn: int = 14336
    vocabulary: int = 128256
    head_tokens: int = 8192
    head_chunk: int = 2048  # rows of logits that head_loss holds at a time
    parameters: int = 1 << 28

    @classmethod
    def tiny(cls) -> Shape:
        return cls(2, 8, 64, 4, 2, 96, 300, 32, 32, 4096)

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence


def randn(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def size(*tensors: Tensor) -> int:
    return sum(t.nbytes for t in tensors)


def both_ways(name: str, functions: dict[str, Callable], inputs: list[Tensor], kept: int) -> Iterator[Case]:
    """Forward and backward of differentiable functions. kept: bytes that the backward must read besides the gradients.

    Every candidate has its own inputs and upstream gradients, because Liger-Kernel's backward overwrites them.
    """
    if GPU:
        functions["compiled"] = compiled(functions["eager"])
    forward, backward, written = {}, {}, 0
    ys: list[Tensor] = []
    for who, function in functions.items():
        own = [x.detach().clone().requires_grad_() for x in inputs]
        forward[who] = partial(function, *own)
        try:
            outputs = listed(function(*own))
        except Exception:
            if who in ("ours", "eager"):
                raise
            continue  # `measure` calls it again and reports why it fails
        ys = ys or outputs  # the first candidate is ours
        torch.manual_seed(1)
        upstream = [torch.randn_like(y) for y in outputs]
        backward[who] = partial(torch.autograd.grad, outputs, own, upstream, retain_graph=True)
        if who == "ours":
            written = size(*{grad.data_ptr(): grad for grad in backward[who]()}.values())
    yield Case(f"{name} forward", size(*inputs, *ys), "bytes", forward)
    yield Case(f"{name} backward", size(*ys) + kept + written, "bytes", backward)


def compiled(function: Callable) -> Callable:
    """The function compiled for one case. Resets Dynamo, because it identifies functions by code, and ours share it."""
    torch.compiler.reset()
    return torch.compile(function, dynamic=False)


def writes(result: Any, function: Callable, *arguments: Any, **named: Any) -> Callable[[], Any]:
    """A call of a function that writes or accumulates its result in place."""

    def call() -> Any:
        function(*arguments, **named)
        return result

    return call


def norm(s: Shape) -> Iterator[Case]:
    x, residual, weight = randn(s.tokens, s.width), randn(s.tokens, s.width), randn(s.width)

    def eager(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (s.width,), weight, 1e-5)

    def eager_add(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        h = x + residual
        return F.rms_norm(h, (s.width,), weight.to(h.dtype), 1e-5).to(x.dtype), h

    plain: dict[str, Callable] = {"ours": rk.rms_norm, "eager": eager}
    added: dict[str, Callable] = {"ours": rk.add_rms_norm, "eager": eager_add}
    if liger:
        plain["liger"] = lambda x, w: liger.liger_rms_norm(x, w, 1e-5, in_place=False)
        added["liger"] = lambda x, r, w: liger.liger_fused_add_rms_norm(x, r, w, 1e-5, in_place=False)
    yield from both_ways("rms_norm", plain, [x, weight], size(x, weight))
    yield from both_ways("add_rms_norm", added, [x, residual, weight], size(residual, weight))
    wide = [x, residual.float(), weight.float()]  # the trainer's dtypes; no other package supports them
    added = {"ours": rk.add_rms_norm, "eager": eager_add}
    yield from both_ways("add_rms_norm, float32 stream", added, wide, size(*wide[1:]))


def rope(s: Shape) -> Iterator[Case]:
    dim = s.width // s.heads
    qkv = randn(s.batch, s.sequence, s.heads + 2 * s.kv_heads, dim)
    table = rk.rope_table(s.sequence, dim, device=DEVICE)

    def eager(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = rk.rope_qkv_reference(x, s.heads, s.kv_heads, *table)
        return q, k, v.contiguous()  # contiguous like ours; attention would copy a view

    functions: dict[str, Callable] = {
        "ours": lambda x: rk.rope_qkv(x, s.heads, s.kv_heads, *table),
        "eager": eager,
    }
    if liger:
        cos, sin = (torch.cat([t, t], -1)[None].to(DTYPE) for t in table)

        def theirs(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = x.split([s.heads, s.kv_heads, s.kv_heads], dim=2)
            q, k = liger.liger_rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
            return q.transpose(1, 2), k.transpose(1, 2), v.contiguous()

        functions["liger"] = theirs
    yield from both_ways("rope_qkv", functions, [qkv], 0)


def swiglu(s: Shape) -> Iterator[Case]:
    def eager(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    packed = randn(s.tokens, 2 * s.ffn)
    functions: dict[str, Callable] = {"ours": rk.swiglu, "eager": lambda x: eager(*x.chunk(2, -1))}
    if liger:
        functions["liger"] = lambda x: liger.liger_swiglu(*x.chunk(2, -1))
    yield from both_ways("swiglu", functions, [packed], size(packed))
    apart: dict[str, Callable] = {"ours": rk.swiglu, "eager": eager}
    if liger:
        apart["liger"] = liger.liger_swiglu
    yield from both_ways("swiglu, two projections", apart, [randn(s.tokens, s.ffn) for _ in range(2)], size(packed))


def head_loss(s: Shape) -> Iterator[Case]:
    x, weight = (randn(rows, s.width).requires_grad_() for rows in (s.head_tokens, s.vocabulary))
    targets = torch.randint(s.vocabulary, (s.head_tokens,), device=DEVICE)

    def step(f: Callable) -> Callable:
        return lambda: torch.autograd.grad(f(x, weight, targets), [x, weight])

    buffer = torch.empty(weight.shape, device=DEVICE)  # a stage keeps the gradient here

    def deferred() -> tuple[Tensor, Tensor]:
        waiting: list[Callable[[Callable], None]] = []
        (dx,) = torch.autograd.grad(rk.head_loss(x, weight, targets, defer=waiting.append), [x])
        first = chain([True], repeat(False))
        with torch.no_grad():
            waiting[0](lambda dl, rows, parts: rk.weight_grad(buffer, dl, rows, first=next(first)))
        return dx, buffer

    calls = {"ours": step(rk.head_loss), "ours, W deferred": deferred, "eager": step(rk.head_loss_reference)}
    if GPU:
        calls["compiled"] = step(compiled(rk.head_loss_reference))
    if liger:
        calls["liger"] = step(lambda x, w, t: listed(liger.liger_fused_linear_cross_entropy(x, w, t))[0])
    yield Case("head_loss F+I+W", 6.0 * s.head_tokens * s.vocabulary * s.width, "flops", calls)


def weight_grad(s: Shape) -> Iterator[Case]:
    dim = s.width // s.heads
    shapes = [((s.heads + 2 * s.kv_heads) * dim, s.width), (2 * s.ffn, s.width), (s.width, s.ffn)]
    for o, k in shapes:
        yield from accumulated(o, k, s.tokens)
        yield from accumulated(o, k, s.sequence)  # a micro-batch of one sample
    yield from accumulated(s.vocabulary, s.width, s.head_chunk)


def accumulated(o: int, k: int, t: int) -> Iterator[Case]:
    """One product dy^T x, added to a buffer in float32 and in fixed point."""
    dy, x, bad = randn(t, o), randn(t, k), torch.zeros(2, device=DEVICE)
    a, b, c = zeros(3, o, k)
    p, q = zeros(2, o, k, dtype=torch.int64)
    exponents = torch.full((o,), 30, dtype=torch.int32, device=DEVICE)

    def eager() -> Tensor:
        return b.add_(dy.T @ x)

    calls: dict[str, Callable[[], Any]] = {"ours": writes(a, rk.weight_grad, a, dy, x), "eager": eager}
    if GPU:
        tile = min(TILES, key=lambda tile: milliseconds(lambda: rk.weight_grad(c, dy, x, tile=tile)))
        calls[f"ours, {tile}"] = writes(c, rk.weight_grad, c, dy, x, tile=tile)
        calls["compiled"] = compiled(eager)
        calls["addmm into fp32"] = lambda: torch.addmm(b, dy.T, x, out_dtype=torch.float32, out=b)
    yield Case(f"weight_grad {o}x{k}x{t}", 2.0 * o * k * t, "flops", calls)
    fixed: dict[str, Callable[[], Any]] = {
        "ours": writes(p, rk.weight_grad_fixed, p, dy, x, exponents, 2.0**58, bad),
        "eager": lambda: q.add_((dy.T @ x).float().mul_(2.0**30).round_().long()),
    }
    yield Case(f"weight_grad_fixed {o}x{k}x{t}", 2.0 * o * k * t, "flops", fixed)


def optimizer(s: Shape) -> Iterator[Case]:
    n = s.parameters
    chunks = rk.make_chunks([n], [True], DEVICE)
    grad, undo = randn(n, dtype=torch.float32), zeros(3, n)
    state, theirs = zeros(3, n), zeros(3, n)
    count, hyper = torch.ones((), device=DEVICE), rk.AdamW(1e-3, weight_decay=0.1)

    def fused() -> tuple[Tensor, ...]:
        p, m, v = ([t] for t in theirs)
        torch._fused_adamw_(p, [grad], m, v, [], [count], **hyper._asdict(), amsgrad=False, maximize=False)
        return theirs

    def copy_first() -> tuple[Tensor, ...]:
        for kept, live in zip(undo, theirs, strict=True):
            kept.copy_(live)
        return fused()

    ours = writes(state, rk.adamw, state, grad, chunks, hyper, 1)
    yield Case("adamw", 28.0 * n, "bytes", {"ours": ours, "eager": fused})  # eager: torch's fused kernel
    for t in (*state, *theirs):
        t.zero_()  # makes the states equal again: the timed calls made different numbers of steps
    ours = writes(state, rk.adamw, state, grad, chunks, hyper, 1, undo=undo)
    yield Case("adamw with undo", 40.0 * n, "bytes", {"ours": ours, "eager": copy_first})
    norms = {
        "ours": lambda: rk.squared_norms(grad, chunks),
        "eager": lambda: torch.linalg.vector_norm(grad).double().square().view(1),
    }
    yield Case("squared_norms", 4.0 * n, "bytes", norms)
    (p, q), bad = zeros(2, n, dtype=torch.int64), torch.zeros(2, device=DEVICE)
    exponents = torch.full((n // s.width,), 40, dtype=torch.int32, device=DEVICE)
    adds = {
        "ours": writes(p, rk.quantise_add, p, grad, exponents, 2.0**58, bad),
        "eager": writes(q, rk.quantise_add_reference, q, grad, exponents, 2.0**58, bad),
    }
    yield Case("quantise_add", 20.0 * n, "bytes", adds)


def zeros(count: int, *shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(shape, dtype=dtype, device=DEVICE) for _ in range(count))


CASES = {f.__name__: f for f in (norm, rope, swiglu, head_loss, weight_grad, optimizer)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    arguments = parser.parse_args()
    if not GPU and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("needs a GPU; without one set TRITON_INTERPRET=1 to compare values only")
    torch.manual_seed(0)
    out = Path(__file__).parent / "out"
    out.mkdir(exist_ok=True)
    if GPU:
        torch._functorch.config.donated_buffer = False  # because backward runs many times on one graph
    rates, shape = machine(), Shape() if GPU else Shape.tiny()
    name = torch.cuda.get_device_name() if GPU else "CPU"
    report = {"machine": f"{name}, torch {torch.__version__}, triton {triton.__version__}", "shape": asdict(shape)}
    if GPU:
        print(report["machine"])
        print(f"copy {rates['bytes'] / 1e9:.2f} TB/s, bfloat16 product {rates['flops'] / 1e9:.0f} TFLOP/s")
    file, earlier = out / "kernels.json", []
    if file.exists() and (found := json.loads(file.read_text())).items() >= report.items():
        earlier = found["kernels"]  # rows of other kernels, from an earlier call on this machine
    rows: list[dict[str, Any]] = []
    for name in arguments.only:
        for case in CASES[name](shape):
            rows.append(measure(case, rates))
            print("  ".join(f"{key} {shown(value)}" for key, value in rows[-1].items()), flush=True)
            kept = [row for row in earlier if row["kernel"] not in {row["kernel"] for row in rows}]
            file.write_text(json.dumps(report | {"rates": rates, "kernels": kept + rows}, indent=1))
    if GPU:
        print(json.dumps({row["kernel"]: {key: row[key] for key in ("share", "speed")} for row in rows}))


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
