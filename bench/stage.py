"""A whole pipeline stage on one GPU: F, I and W with the kernels and with the torch references.

    python bench/stage.py [--layers 4] [--peak 989]

A middle stage of a 4096-wide Llama, micro-batches of one sample of 4096 tokens, bfloat16. Medians in milliseconds,
tokens/s through F + I + W, MFU (6 flops a weight and token, causal attention at half of 12 L H T, over --peak),
peak memory. Both rows run the same Stage that the trainer runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from recycle_pp.model.stage import Stage
from recycle_pp.settings import Model, Numerics, Parallel, Settings

TIMES = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--peak", type=float, default=989.0, help="TFLOP/s: dense bfloat16 of an H100 or H200")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    rows = [measure(kernels, arguments.layers, arguments.peak) for kernels in ("triton", "reference")]
    print("  ".join(f"{name:>10}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{v:10.3f}" if isinstance(v, float) else f"{v:>10}" for v in row.values()))
    out = Path(__file__).parent / "out"
    out.mkdir(exist_ok=True)
    (out / "stage.json").write_text(json.dumps(rows, indent=1))


def measure(kernels: str, layers: int, peak: float) -> dict[str, Any]:
    model = Model(layers=3 * layers, width=4096, heads=32, kv_heads=8, ffn=14336, sequence=4096, kernels=kernels)
    parallel = Parallel(pipelines=1, stages=3, microbatches=4, microbatch_size=1)
    settings = Settings(model=model, parallel=parallel, numerics=Numerics(precision="bf16"))
    stage = Stage(settings, 1, torch.device("cuda"))
    shape, dtype = stage.boundary
    x, dy = (torch.randn(shape, dtype=dtype, device="cuda") for _ in range(2))
    torch.cuda.reset_peak_memory_stats()
    times: dict[str, list[float]] = {"F": [], "I": [], "W": []}
    for _ in range(TIMES):
        times["F"].append(milliseconds(stage.forward, 0, 0, x))
        times["I"].append(milliseconds(stage.backward_input, 0, dy))
        times["W"].append(milliseconds(stage.backward_weight, 0))
    medians = {name: statistics.median(values) for name, values in times.items()}
    total, tokens = sum(medians.values()), shape[0] * shape[1]
    weights = sum(parameter.numel() for parameter in stage.parameters.values())
    flops = 6.0 * tokens * (weights + layers * model.width * model.sequence)
    rates = {"tokens/s": 1e3 * tokens / total, "MFU": flops / total / peak / 1e9}
    return {"kernels": kernels} | medians | rates | {"GiB": torch.cuda.max_memory_allocated() / 2**30}


def milliseconds(call: Any, *arguments: Any) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    call(*arguments)
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


if __name__ == "__main__":
    main()
