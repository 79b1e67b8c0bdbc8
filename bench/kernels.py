"""The kernels against eager torch, torch.compile and Liger-Kernel on one GPU.

    pip install liger-kernel                              # or leave that column out
    python bench/kernels.py                               # every kernel, bfloat16, shapes of a 4096-wide model
    python bench/kernels.py --only weight_grad head_loss
    TRITON_INTERPRET=1 python bench/kernels.py            # no GPU: every candidate once, tiny, values only

One run measures the machine first: the rate of a large copy and of a large bfloat16 product. Then per kernel the median
milliseconds of each candidate (the L2 cache is flushed between runs), ours as a share of that rate (bytes that must
move, or flops that must be done, in our time), our speed over the best other, and the relative difference of our
values from eager's. `weight_grad` also tries every tile and names the fastest: what the table of the kernel should say.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import recycle_kernels as rk
import torch
import torch._functorch.config
import triton.testing
from torch import Tensor
from torch.nn import functional as F

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
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
    """Llama-3-8B's layer at 16384 tokens; `tiny` for a run without a GPU."""

    batch: int = 4
    sequence: int = 4096
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    ffn: int = 14336
    vocabulary: int = 128256
    head_tokens: int = 8192
    parameters: int = 1 << 28

    @classmethod
    def tiny(cls) -> Shape:
        return cls(1, 16, 64, 4, 2, 96, 300, 32, 4096)

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence


@dataclass
class Case:
    """One thing to do, several ways. `ours` and `eager` are always there; a call returns what is compared."""

    name: str
    amount: float  # bytes that must move, or flops
    unit: str  # bytes | flops
    calls: Mapping[str, Callable[[], Any]]


def randn(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def size(*tensors: Tensor) -> int:
    return sum(t.nbytes for t in tensors)


def both_ways(name: str, functions: dict[str, Callable], inputs: list[Tensor], kept: int) -> Iterator[Case]:
    """Forward and backward of differentiable functions; `kept`: bytes that backward must read beside the gradients.

    Every candidate has inputs and upstream gradients of its own: Liger-Kernel's backward writes into what it gets.
    """
    if GPU:
        functions["compiled"] = torch.compile(functions["eager"])
    forward, backward, written, ys = {}, {}, 0, []
    for who, function in functions.items():
        own = [x.detach().clone().requires_grad_() for x in inputs]
        outputs = listed(function(*own))
        ys = ys or outputs  # ours come first
        torch.manual_seed(1)
        upstream = [torch.randn_like(y) for y in outputs]
        forward[who] = partial(function, *own)
        backward[who] = partial(torch.autograd.grad, outputs, own, upstream, retain_graph=True)
        if who == "ours":
            written = size(*{grad.data_ptr(): grad for grad in backward[who]()}.values())
    yield Case(f"{name} forward", size(*inputs, *ys), "bytes", forward)
    yield Case(f"{name} backward", size(*ys) + kept + written, "bytes", backward)


def listed(x: Any) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else list(x)


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
    wide = [x, residual.float(), weight.float()]  # as the trainer has it; no other package does
    added = {"ours": rk.add_rms_norm, "eager": eager_add}
    yield from both_ways("add_rms_norm, float32 stream", added, wide, size(*wide[1:]))


def rope(s: Shape) -> Iterator[Case]:
    dim = s.width // s.heads
    qkv = randn(s.batch, s.sequence, s.heads + 2 * s.kv_heads, dim)
    table = rk.rope_table(s.sequence, dim, device=DEVICE)
    functions: dict[str, Callable] = {
        "ours": lambda x: rk.rope_qkv(x, s.heads, s.kv_heads, *table),
        "eager": lambda x: rk.rope_qkv_reference(x, s.heads, s.kv_heads, *table),
    }
    if liger:
        cos, sin = (torch.cat([t, t], -1)[None].to(DTYPE) for t in table)

        def theirs(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = x.split([s.heads, s.kv_heads, s.kv_heads], dim=2)
            q, k = liger.liger_rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
            return q.transpose(1, 2), k.transpose(1, 2), v

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

    def deferred() -> tuple[Tensor, Tensor]:
        waiting: list[Callable[[Callable], None]] = []
        (dx,) = torch.autograd.grad(rk.head_loss(x, weight, targets, defer=waiting.append), [x])
        buffer = torch.zeros(weight.shape, device=DEVICE)
        with torch.no_grad():
            waiting[0](lambda dl, rows, parts: rk.weight_grad(buffer, dl, rows))
        return dx, buffer

    calls = {"ours": step(rk.head_loss), "ours, W deferred": deferred, "eager": step(rk.head_loss_reference)}
    if GPU:
        calls["compiled"] = step(torch.compile(rk.head_loss_reference))
    if liger:
        calls["liger"] = step(lambda x, w, t: listed(liger.liger_fused_linear_cross_entropy(x, w, t))[0])
    yield Case("head_loss F+I+W", 6.0 * s.head_tokens * s.vocabulary * s.width, "flops", calls)


def weight_grad(s: Shape) -> Iterator[Case]:
    dim = s.width // s.heads
    shapes = [((s.heads + 2 * s.kv_heads) * dim, s.width), (2 * s.ffn, s.width), (s.width, s.ffn)]
    for o, k in shapes:
        yield from accumulated(o, k, s.tokens)


def accumulated(o: int, k: int, t: int) -> Iterator[Case]:
    """One product dy^T x, added to a buffer in float32 and in fixed point."""
    dy, x, bad = randn(t, o), randn(t, k), torch.zeros((), device=DEVICE)
    a, b = (torch.zeros(o, k, device=DEVICE) for _ in range(2))
    p, q = (torch.zeros(o, k, dtype=torch.int64, device=DEVICE) for _ in range(2))

    def eager() -> Tensor:
        return b.add_(dy.T @ x)

    calls: dict[str, Callable[[], Any]] = {
        "ours": lambda: rk.weight_grad(a, dy, x),
        "eager": eager,
    }
    if GPU:
        tile = min(TILES, key=lambda tile: milliseconds(lambda: rk.weight_grad(a, dy, x, tile=tile)))
        calls[f"ours, {tile}"] = lambda: rk.weight_grad(a, dy, x, tile=tile)
        calls["compiled"] = torch.compile(eager)
        calls["cuBLAS into fp32"] = lambda: torch.addmm(b, dy.T, x, out_dtype=torch.float32, out=b)
    yield Case(f"weight_grad {o}x{k}x{t}", 2.0 * o * k * t, "flops", calls)
    fixed: dict[str, Callable[[], Any]] = {
        "ours": lambda: rk.weight_grad_fixed(p, dy, x, 30, 2.0**58, bad),
        "eager": lambda: q.add_((dy.T @ x).float().mul_(2.0**30).round_().long()),
    }
    yield Case(f"weight_grad_fixed {o}x{k}x{t}", 2.0 * o * k * t, "flops", fixed)


def optimizer(s: Shape) -> Iterator[Case]:
    n = s.parameters
    chunks = rk.make_chunks([n], [True], DEVICE)
    grad, undo = randn(n, dtype=torch.float32), zeros(3, n)
    state, theirs = zeros(3, n), zeros(3, n)
    count, lr, decay = torch.ones((), device=DEVICE), 1e-3, 0.1
    hyper = rk.AdamW(lr, weight_decay=decay)

    def fused() -> None:
        p, m, v = ([t] for t in theirs)
        torch._fused_adamw_(
            p,
            [grad],
            m,
            v,
            [],
            [count],
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
            lr=lr,
            weight_decay=decay,
        )

    def copy_first() -> None:
        for kept, live in zip(undo, theirs, strict=True):
            kept.copy_(live)
        fused()

    step = partial(rk.adamw, state, grad, chunks, hyper, 1)
    yield Case("adamw", 28.0 * n, "bytes", {"ours": step, "eager": fused})  # eager: torch's fused kernel
    with_undo = {"ours": partial(step, undo=undo), "eager": copy_first}
    yield Case("adamw with undo", 40.0 * n, "bytes", with_undo)
    bad = torch.zeros((), device=DEVICE)
    q = torch.zeros(n, dtype=torch.int64, device=DEVICE)
    norms = {
        "ours": lambda: rk.squared_norms(grad, chunks),
        "eager": lambda: torch.linalg.vector_norm(grad).double().square().view(1),
    }
    yield Case("squared_norms", 4.0 * n, "bytes", norms)
    adds = {
        "ours": lambda: rk.quantise_add(q, grad, 40, 2.0**58, bad),
        "eager": lambda: rk.quantise_add_reference(q, grad, 40, 2.0**58, bad),
    }
    yield Case("quantise_add", 20.0 * n, "bytes", adds)


def zeros(*shape: int) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(shape, device=DEVICE))


CASES = {f.__name__: f for f in (norm, rope, swiglu, head_loss, weight_grad, optimizer)}


def measure(case: Case, rates: dict[str, float]) -> dict[str, Any]:
    """One row: median milliseconds of every candidate, our share of the machine's rate, speed, difference."""
    row: dict[str, Any] = {"kernel": case.name}
    difference = apart(case.calls["ours"](), case.calls["eager"]())
    peaks: dict[str, int] = {}
    for who, call in case.calls.items():
        try:
            peaks[who], row[who] = timed(call)
        except Exception as reason:  # another package's function may not take this shape or version: say so, go on
            if who.startswith("ours"):
                raise
            row[who] = f"({type(reason).__name__}: {str(reason)[:60]})"
    if GPU:
        others = [row[who] for who in peaks if not who.startswith("ours")]
        row |= {"share": case.amount / rates[case.unit] / row["ours"], "speed": min(others) / row["ours"]}
    return row | {"difference": difference, "MiB": peaks}


def timed(call: Callable[[], Any]) -> tuple[int, float]:
    """(MiB at the peak above what was there, median milliseconds); one plain run without a GPU."""
    if not GPU:
        began = time.perf_counter()
        call()
        return 0, 1e3 * (time.perf_counter() - began)
    call()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) >> 20
    return peak, milliseconds(call)


def milliseconds(call: Callable[[], Any]) -> float:
    """The median of a kernel's time on the GPU; infinite for a tile that does not fit it."""
    try:
        return triton.testing.do_bench(call, warmup=50, rep=300, return_mode="median")
    except triton.runtime.errors.OutOfResources:
        return float("inf")


def apart(ours: Any, eager: Any) -> float | None:
    """The largest relative difference of the results, in norm; None for calls that return nothing."""
    if ours is None:
        return None
    pairs = zip(listed(ours), listed(eager), strict=True)
    return max(((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in pairs)


def machine() -> dict[str, float]:
    """Bytes a millisecond of a large copy (read and write), flops a millisecond of a large bfloat16 product."""
    if not GPU:
        return {"bytes": 1.0, "flops": 1.0}
    source, target = (torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    a, b = randn(8192, 8192), randn(8192, 8192)
    copy = timed(lambda: target.copy_(source))[1]
    product = timed(lambda: a @ b)[1]
    return {"bytes": 2 * source.nbytes / copy, "flops": 2 * 8192**3 / product}


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
        torch._functorch.config.donated_buffer = False  # backward runs many times over one graph
    rates, shape = machine(), Shape() if GPU else Shape.tiny()
    if GPU:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
        print(f"copy {rates['bytes'] / 1e9:.2f} TB/s, bfloat16 product {rates['flops'] / 1e9:.0f} TFLOP/s")
    rows = []
    for name in arguments.only:
        for case in CASES[name](shape):
            rows.append(measure(case, rates))
            print("  ".join(f"{key} {shown(value)}" for key, value in rows[-1].items()), flush=True)
    report = {"shape": asdict(shape), "rates": rates, "kernels": rows}
    (out / "kernels.json").write_text(json.dumps(report, indent=1))


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
