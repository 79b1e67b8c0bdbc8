"""A whole pipeline stage on one GPU: F, I, W and O with the kernels and with the torch references.

    python bench/stage.py [--layers 4] [--peak 989]
    TRITON_INTERPRET=1 python bench/stage.py              # without a GPU: everything once, tiny, as a smoke test

The bench runs a middle and a last stage of a 4096-wide Llama (vocabulary 128256) in bfloat16, on micro-batches of one
sample of 4096 tokens. All rows run the trainer's Stage, warmed up as in the trainer. They show medians in milliseconds,
tokens/s through F + I + W, and peak memory of F, I and W.

    MFU       6 flops for each weight and token, and half of 12 L H T for causal attention, as a share of --peak; the
              second projection in W does not count
    split     how much longer I and then W take than B
    synced    how much longer F, I and W take if the host waits for the GPU after each op, as the trainer does
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from typing import Any

import torch
from results import save

from recycle_pp.config.settings import Model, Numerics, Parallel, Settings
from recycle_pp.model.stage import Stage
from recycle_pp.model.stage_module import Batch
from recycle_pp.numerics.optimizer import StageOptimizer

GPU = torch.cuda.is_available()
Sizes = dict[str, Any]
SHAPE: Sizes = {"width": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "sequence": 4096, "vocabulary": 128256}
TINY: Sizes = {"width": 32, "heads": 2, "kv_heads": 1, "ffn": 48, "sequence": 16, "vocabulary": 64}
TIMES = 20 if GPU else 1
ROW = 8 if GPU else 1  # micro-batches in a row
STAGES = {"middle": 1, "last": 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="layers of each stage")
    parser.add_argument("--peak", type=float, default=989.0, help="TFLOP/s: dense bfloat16 of an H100 or H200")
    arguments = parser.parse_args()
    if not GPU and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("needs a GPU; without one set TRITON_INTERPRET=1 to see that it runs")
    rows: list[dict[str, Any]] = []
    for place in STAGES:
        for kernels in ("triton", "reference"):
            rows.append(measure(place, kernels, arguments.layers, arguments.peak))
            if len(rows) == 1:
                print("  ".join(f"{name:>10}" for name in rows[0]))
            print(
                "  ".join(f"{v:10.3f}" if isinstance(v, float) else f"{v:>10}" for v in rows[-1].values()), flush=True
            )
            save("stage.json", rows)
            gc.collect()
            if GPU:
                torch.cuda.empty_cache()
    print(
        json.dumps(
            {f"{row['stage']} {row['kernels']}": {k: row[k] for k in ("MFU free", "split", "synced")} for row in rows}
        )
    )


def measure(place: str, kernels: str, layers: int, peak: float) -> dict[str, Any]:
    model = Model(layers=3 * layers, kernels=kernels, **(SHAPE if GPU else TINY))
    parallel = Parallel(pipelines=1, stages=3, microbatches=4, microbatch_size=1)
    settings = Settings(model=model, parallel=parallel, numerics=Numerics(precision="bf16-autocast"))
    device = torch.device("cuda" if GPU else "cpu")
    stage = Stage(settings, STAGES[place], device)
    optimizer = StageOptimizer(settings, stage)
    stage.warm()
    optimizer.warm()
    shape = (parallel.microbatch_size, model.sequence)
    tokens = torch.randint(model.vocabulary, shape, device=device)
    batch = Batch(tokens, tokens) if stage.module.reads else None
    taken, grads = (
        [torch.randn(of.shape, dtype=of.dtype, device=device) for of in boundary]
        for boundary in (stage.module.takes, stage.module.gives)
    )
    times: dict[str, list[float]] = {"F": [], "I": [], "W": [], "O": []}
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(TIMES):
        times["F"].append(milliseconds(stage.forward, 0, 0, batch, taken))
        times["I"].append(milliseconds(stage.backward_input, 0, grads))
        times["W"].append(milliseconds(stage.backward_weight, 0))
    memory = torch.cuda.max_memory_allocated() / 2**30 if GPU else 0.0

    def run(parts: str, wait: bool) -> None:
        """Runs the ops `parts` of ROW micro-batches in a row. wait: whether to wait for the GPU after each op."""
        calls = {
            "F": lambda: stage.forward(0, 0, batch, taken),
            "B": lambda: stage.backward(0, grads),
            "I": lambda: stage.backward_input(0, grads),
            "W": lambda: stage.backward_weight(0),
        }
        for part in parts * ROW:
            calls[part]()
            if wait and GPU:
                torch.cuda.synchronize()

    def several(parts: str, wait: bool) -> float:
        """Median milliseconds of a micro-batch, if ROW of them run in a row."""
        return statistics.median(milliseconds(run, parts, wait) for _ in range(TIMES)) / ROW

    free = several("FIW", False)
    apart = {"split": free / several("FB", False) - 1, "synced": several("FIW", True) / free - 1}
    reduced = stage.gradients.reduced(stage.gradients.payload())
    times["O"] = [milliseconds(optimizer.step, reduced, step, 0.5) for step in range(TIMES)]
    medians = {name: statistics.median(values) for name, values in times.items()}
    total, count = medians["F"] + medians["I"] + medians["W"], shape[0] * shape[1]
    weights = sum(parameter.numel() for parameter in stage.parameters.values())
    flops = 6.0 * count * (weights + layers * model.width * model.sequence)
    rates = {"tokens/s": 1e3 * count / total, "MFU": flops / total / peak / 1e9}
    rates |= {"MFU free": flops / free / peak / 1e9}  # without a wait for the GPU after each op
    return {"stage": place, "kernels": kernels} | medians | rates | apart | {"GiB": memory}


def milliseconds(call: Any, *arguments: Any) -> float:
    if GPU:
        torch.cuda.synchronize()
    began = time.perf_counter()
    call(*arguments)
    if GPU:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


if __name__ == "__main__":
    main()
