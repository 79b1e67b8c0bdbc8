"""model.split=auto: measures the times of the layers and chooses the boundaries between stages.

    settings.with_values({"model.split": balanced(settings)})   # before any worker starts
    python -m recycle_pp.fitting.balance < settings.json    # the measuring process: prints the layers' times

An embedding or a head with a large vocabulary takes as long as several layers. The embedding counts as a part of the
first layer, the head as a part of the last one. One layer of each sort (first, inner, last) runs on a micro-batch of
zeros, on the device of the workers, and `plan_layout` computes the boundaries. The measurement takes seconds, so it
runs only if the numbers of weights suggest that stages with equal numbers of layers (as equal as possible) are not the
best ones.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict
from statistics import median
from typing import Any

from recycle_schedules import Problem
from recycle_schedules.bounds import LayoutBounds
from recycle_schedules.layers import TIMES
from recycle_schedules.op_kinds import SPLIT, OpKind

from recycle_pp.config.loading import load
from recycle_pp.config.settings import Settings
from recycle_pp.model.memory import parameters
from recycle_pp.model.split import layers_of

from .problem import initial_problem

ENOUGH = 1.02
"""Stages keep equal numbers of layers if the lower bound for them is at most this multiple of the best layout's lower
bound. Both bounds take numbers of weights as times."""
REPEATS = 5
ROOM = 0.9
"""Share of a GPU's memory for layers and micro-batches in flight; the rest is for messages and torch."""


def balanced(settings: Settings) -> list[int] | None:
    """The number of layers of each stage; None for equal numbers.

    Returns None with emulated compute, with a model that is not the project's own, or if equal numbers are best.
    Returns None and prints a sentence if the measurement fails. Blocks during the measurement.
    """
    if settings.emulate.mode or settings.model.kind != "transformer" or settings.parallel.stages == 1:
        return None
    assert isinstance(settings.model.layers, int)
    even = tuple(map(len, layers_of(settings.model.layers, settings.parallel.stages)))
    bounds = LayoutBounds(_problem(settings, dict.fromkeys(SPLIT, by_weights(settings))))
    if bounds.of(even) <= ENOUGH * bounds.best:
        return None
    command = [sys.executable, "-m", "recycle_pp.fitting.balance"]
    done = subprocess.run(command, input=json.dumps(asdict(settings)), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(
            "model.split=auto: the layers could not be measured; stages have equal numbers of layers", file=sys.stderr
        )
        return None
    return layout_of(settings, json.loads(done.stdout.splitlines()[-1]))


def layout_of(settings: Settings, measured: dict[str, Any]) -> list[int] | None:
    """The best layout for the result of `measure`; None for equal numbers of layers, or if no layout fits."""
    from recycle_schedules import plan_layout

    assert isinstance(settings.model.layers, int)
    try:
        found = plan_layout(_problem(settings, measured["layers"], measured["capacity_bytes"])).layout
    except ValueError as error:
        print(f"model.split=auto: {error}; stages have equal numbers of layers", file=sys.stderr)
        return None
    even = [len(layers) for layers in layers_of(settings.model.layers, settings.parallel.stages)]
    return None if found is None or list(found) == even else list(found)


def by_weights(settings: Settings) -> list[float]:
    """The work of each layer: its number of weights, without the embedding, which needs no multiplication."""
    model = settings.model
    assert isinstance(model.layers, int)
    counts = [float(parameters(model, range(k, k + 1))) for k in range(model.layers)]
    counts[0] -= model.vocabulary * model.width
    return counts


def _problem(settings: Settings, layers: dict[str, list[float]], capacity: float | None = None) -> Problem:
    return initial_problem(settings).replace(
        durations=None, layers=layers, capacity_bytes=capacity, memory=None, backward=settings.schedule.backward
    )


# ---- the process that measures


def measure(settings: Settings) -> dict[str, Any]:
    """{"layers": the problem's key, times in seconds, "capacity_bytes": usable bytes of the GPU, None on a CPU}."""
    import torch

    torch.set_num_threads(1)  # the CPU clock of this thread then counts all of the work
    count = settings.model.layers
    assert isinstance(count, int)
    on_gpu = settings.run.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    alone = settings.with_values({"model.split": None, "parallel.stages": count})
    of = {k: _one_layer(alone, k, device) for k in sorted({0, 1, count - 1})}
    each = [of[k] if k in of else of[1] for k in range(count)]
    layers = {key: [one[key] for one in each] for key in of[0]}
    capacity = ROOM * torch.cuda.get_device_properties(device).total_memory if on_gpu else None
    return {"layers": layers, "capacity_bytes": capacity}


def _one_layer(settings: Settings, layer: int, device: Any) -> dict[str, float]:
    """Median seconds of F, I, W and O of a stage with only this layer; on a GPU also its bytes."""
    import torch

    from recycle_pp.model.stage import Stage
    from recycle_pp.model.stage_module import Batch
    from recycle_pp.numerics.optimizer import StageOptimizer

    on_gpu = device.type == "cuda"

    def allocated() -> int:
        return torch.cuda.memory_allocated(device) if on_gpu else 0

    empty = allocated()
    stage = Stage(settings, layer, device)
    optimizer = StageOptimizer(settings, stage)
    stage.warm()
    batch = Batch.blank(settings, device) if stage.module.reads else None
    taken = [of.empty(device).zero_() for of in stage.module.takes]
    grads = [of.empty(device).zero_() for of in stage.module.gives if of.differentiable]
    seconds: dict[str, list[float]] = {kind: [] for kind in TIMES}
    held = allocated() - empty
    in_flight = 0
    clock = time.perf_counter if on_gpu else time.thread_time  # without the time of other processes

    def timed(kind: str, call: Any, *arguments: Any) -> None:
        began = clock()
        call(*arguments)
        if on_gpu:
            torch.cuda.synchronize(device)
        seconds[kind].append(clock() - began)

    for _ in range(REPEATS):
        timed(OpKind.FORWARD, stage.forward, 0, 0, batch, taken)
        in_flight = allocated() - empty - held
        timed(OpKind.BACKWARD_INPUT, stage.backward_input, 0, grads)
        timed(OpKind.BACKWARD_WEIGHT, stage.backward_weight, 0)
    payload = stage.gradients.payload()
    reduced = stage.gradients.reduced(payload)
    for step in range(REPEATS):
        timed(OpKind.OPTIMIZER, optimizer.step, reduced, step, 0.0)
    found = {kind: median(of) for kind, of in seconds.items()}
    if on_gpu:
        found |= {"bytes": float(allocated() - empty), "activation_bytes": float(max(in_flight, 0))}
    return found


if __name__ == "__main__":
    print(json.dumps(measure(load(json.load(sys.stdin)))))
