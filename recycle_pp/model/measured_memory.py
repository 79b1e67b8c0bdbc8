"""Measures the memory of a stage's worker with micro-batches of zeros, for models that `model.memory` does not cover.

    (memory,) = measured_memory(stage)               # StageMemory; before the first step, without side effects
    kept, recomputed = measured_memory(stage)        # with model.recompute=auto

On a CPU torch's profiler counts the bytes of tensors; on a GPU torch's allocator does. If shapes depend on the contents
of the batch (chosen experts), the result is that for a batch of zeros. On a CPU the first profile of a process takes
seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

import torch
from recycle_schedules import StageMemory
from torch import Tensor

from recycle_pp.data.batches import blank

from .memory import communicators, log_elsewhere, parameter_memory
from .stage import Stage


def measured_memory(stage: Stage) -> list[StageMemory]:
    """The memory of a worker of the stage. With model.recompute=auto returns two results: without and with
    recomputation. Runs four micro-batches for each result."""
    module, before = stage.module, stage.module.recompute
    ways = [False, True] if stage.settings.model.recompute == "auto" else [before]
    found = []
    for module.recompute in ways:
        found.append(_with_activations(stage))
    module.recompute = before
    return found


@dataclass
class Allocations:
    """The change of the allocated bytes within `allocations`.

    kept  increase from start to end
    peak  largest increase since the start, at any time before the end
    """

    kept: int = 0
    peak: int = 0


@contextmanager
def allocations(device: torch.device) -> Iterator[Allocations]:
    """Counts the allocations in the `with` block: of this thread on a CPU, of the process on a GPU. Memory that was
    allocated earlier and is freed in the block counts as negative (on a CPU only if torch knows its size)."""
    of = Allocations()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield of
        of.kept = torch.cuda.memory_allocated(device) - before
        of.peak = torch.cuda.max_memory_allocated(device) - before
        return
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        yield of
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    levels = list(accumulate((event.nbytes() for event in sorted(events, key=lambda e: e.start_ns())), initial=0))
    of.kept, of.peak = levels[-1], max(levels)


def _with_activations(stage: Stage) -> StageMemory:
    grads = [of.empty(stage.device).zero_() for of in stage.module.gives if of.differentiable]
    for g in range(2):  # the first use allocates memory that stays: sums, the kernels' workspaces
        _forward(stage, g)
        stage.backward(g, grads)
    with allocations(stage.device) as forward:
        sent = _forward(stage, 2)  # bytes that stay in the replay log, which is counted separately
    flight = forward.kept - (0 if stage.last else sent)
    with allocations(stage.device) as inputs:
        given = stage.backward_input(2, grads)
    waiting = flight + inputs.kept - _bytes(given) + _bytes(grads)  # W of the last layer needs the incoming gradient
    with allocations(stage.device) as weights:
        stage.backward_weight(2)
    _forward(stage, 3)
    with allocations(stage.device) as whole:
        stage.backward(3, grads)
    stage.gradients.clear()
    split_peak = max(forward.peak, flight + inputs.peak, waiting + weights.peak)
    takes = [of for of in stage.module.takes if of.differentiable]  # gradients that the stage sends
    boundary = sum(of.nbytes for of in [*takes, *stage.module.gives])
    module = stage.module
    sizes: dict[bool, list[int]] = {True: [], False: []}
    for name, shape in module.shapes.items():
        sizes[len(shape) == 2 and 0 <= module.layers[name] < module.depth].append(prod(shape))
    held = parameter_memory(stage.settings, sizes[True], sizes[False], stage.device.type)
    frozen = sum(prod(shape) for shape in module.frozen.values()) * stage.working.dtype.itemsize
    return replace(
        held,
        weights=held.weights + frozen,
        boundary=0 if log_elsewhere(stage.settings, stage.device.type) else boundary,
        flight=max(0, flight),
        waiting=max(0, waiting),
        op=max(0, split_peak - max(flight, waiting)),
        whole_op=max(0, max(forward.peak, flight + whole.peak) - flight),
        **communicators(stage.settings, stage.stage, stage.device.type),
    )


def _forward(stage: Stage, g: int) -> int:
    """Runs the forward of micro-batch g. Returns the bytes of the tensors that the stage sends."""
    batch = blank(stage.settings) if stage.module.reads else None
    taken = [of.empty(stage.device).zero_() for of in stage.module.takes]
    return _bytes(stage.forward(0, g, batch, taken))


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


__all__ = ["Allocations", "allocations", "measured_memory"]
