"""A benchmark case: one task with several implementations, which are timed and whose results are compared.

    row = measure(Case("product", 2.0 * n**3, "flops", {"ours": f, "eager": g, "liger": h}), machine())

On a GPU, the time of an implementation is the median of many runs, with the L2 cache flushed between them. Before each
run the GPU is kept busy until the host has launched the whole run, so the time does not include the host's work. The
rate of a case that moves bytes is compared with a copy of the same number of bytes. Without a GPU each implementation
runs once, to compare the results.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
CACHE = 256 << 20  # bytes; more than the L2 cache of any GPU
AHEAD = 2_000_000  # cycles for which the GPU waits before each run, about 1 ms
SECONDS = 0.15  # time for the runs of each implementation


@dataclass
class Case:
    """One task and its implementations, including `ours` and `eager`. A call returns the results to compare."""

    name: str
    amount: float  # bytes that must move, or flops
    unit: str  # bytes | flops
    calls: Mapping[str, Callable[[], Tensor | tuple[Tensor, ...]]]


def measure(case: Case, rates: dict[str, float]) -> dict[str, Any]:
    """A row: each implementation's median milliseconds, our share of the machine's rate, speed, difference, memory."""
    row: dict[str, Any] = {"kernel": case.name}
    difference = apart(case.calls["ours"](), case.calls["eager"]())  # first, because some calls add to their result
    peaks: dict[str, int] = {}
    for who, call in case.calls.items():
        try:
            peaks[who], row[who] = timed(call)
        except Exception as reason:  # another package may not support this shape or version
            if who.startswith("ours"):
                raise
            row[who] = f"({type(reason).__name__}: {str(reason)[:60]})"
    if GPU:
        others = [row[who] for who in peaks if not who.startswith("ours")]
        bound = case.amount / rates["flops"] if case.unit == "flops" else copying(int(case.amount))
        row |= {"share": bound / row["ours"], "speed": min(others) / row["ours"]}
    return row | {"difference": difference, "MiB": peaks}


def machine() -> dict[str, float]:
    """The machine's rates: bytes per millisecond in a large copy (read and write), and flops per millisecond in a large
    bfloat16 product. Without a GPU both are 1."""
    if not GPU:
        return {"bytes": 1.0, "flops": 1.0}
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    copy, product = copying(2 << 30), milliseconds(lambda: a @ b)
    return {"bytes": (2 << 30) / copy, "flops": 2 * 8192**3 / product}


def copying(amount: int) -> float:
    """Milliseconds of a copy that reads and writes this number of bytes together."""
    source, target = (torch.empty(amount // 2, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    return milliseconds(lambda: target.copy_(source))


def milliseconds(call: Callable[[], Any]) -> float:
    """The median time of a call on the GPU, without the host's work; infinite for a tile that does not fit on the
    GPU."""
    try:
        call()
    except triton.runtime.errors.OutOfResources:
        return float("inf")
    cache = torch.empty(CACHE, dtype=torch.uint8, device=DEVICE)
    times: list[float] = []
    until = time.perf_counter() + SECONDS
    while len(times) < 5 or time.perf_counter() < until:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cache.zero_()
        torch.cuda._sleep(AHEAD)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[1:])


def listed(x: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    """The results of a call."""
    return [x] if isinstance(x, Tensor) else list(x)


def timed(call: Callable[[], Any]) -> tuple[int, float]:
    """(peak memory in MiB above the level before the call, median milliseconds). Without a GPU: (0, milliseconds of one
    run)."""
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


def apart(ours: Tensor | tuple[Tensor, ...], eager: Tensor | tuple[Tensor, ...]) -> float:
    """The largest relative difference between the results, as a ratio of norms."""
    pairs = zip(listed(ours), listed(eager), strict=True)
    return max(((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in pairs)
