"""What a run needs, in numbers, before any worker starts: parameters, tokens a step, bytes a worker.

    for line in footprint(settings, workers_here=4): print(line)
    bytes_of(settings, stage=0)             # {"weights": ..., "gradients": ..., ...}

Without deaths: a dead worker's peers hold up to memory_extra more. The counts of activations are those of the reference
kernels in float32 (a test measures them); in bf16 they are half of it, under autocast somewhat less.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

from recycle_schedules import Worker

from recycle_pp.config.checks import int32_bits
from recycle_pp.config.settings import Model, Settings
from recycle_pp.config.sizes import format_size
from recycle_pp.model.split import layers_of

from .problem import initial_problem

FLOAT = 4
PROCESS = 280_000_000  # bytes of a worker on a CPU before it holds anything: Python and torch


def footprint(settings: Settings, workers_here: int) -> list[str]:
    """Up to four sentences. workers_here: on this machine. What a model that is not our own holds only its workers
    know."""
    p = settings.parallel
    samples = p.pipelines * p.microbatches * p.microbatch_size
    each_step = f"each step: {samples} sample{'s' * (samples != 1)}, {samples * settings.model.sequence:,} tokens"
    if not settings.model.own:
        return [each_step]
    count = sum(parameters(settings.model, layers) for layers in _layers(settings))
    lines = [f"{_count(count)} parameters in {p.stages} stage{'s' * (p.stages != 1)}; {each_step}"]
    if settings.numerics.sums == "int32":
        terms = p.pipelines * p.microbatches
        lines.append(
            f"sums of {terms} gradients in int32: the largest element of a row keeps {int32_bits(terms)} bits "
            "(bench/sums.py measures the error)"
        )
    if settings.emulate.mode:
        return lines
    needs = [bytes_of(settings, stage) for stage in range(p.stages)]
    stage = max(range(p.stages), key=lambda s: sum(needs[s].values()))
    parts = ", ".join(f"{name} {format_size(size)}" for name, size in needs[stage].items() if size)
    most = sum(needs[stage].values())
    lines.append(f"a worker of stage {stage}, the fullest, holds about {format_size(most)}: {parts}")
    gpu = None if settings.run.device == "cpu" else _gpu_memory()
    need, have = (most, gpu) if gpu is not None else (_all_here(settings, needs, workers_here), _memory())
    ours = "the worker" if workers_here == 1 else f"the {workers_here} workers"
    here = f"{ours} of this machine, torch included, may need {format_size(need)}; it has"
    where = "its GPU has" if gpu is not None else here
    if have is not None:
        lines.append(f"{where} {format_size(have)}" + (": that is not enough" if need > have else ""))
    crowded = crowd(workers_here) if gpu is None else None
    return [*lines, crowded] if crowded else lines


def crowd(workers_here: int) -> str | None:
    """A warning where there are more workers than cores; None otherwise."""
    cores = os.cpu_count() or 1
    if workers_here <= cores:
        return None
    return f"{workers_here} workers share {'1 core' if cores == 1 else f'{cores} cores'}: times are measured on the CPU"


def _layers(settings: Settings) -> list[range]:
    model = settings.model
    assert isinstance(model.layers, int)  # of our own
    return layers_of(model.layers, settings.parallel.stages, model.split)


def parameters(model: Model, layers: range) -> int:
    """The number of parameters of a stage with these layers."""
    head, turned = model.head_size, model.heads + model.kv_heads
    attention = model.width * (turned + model.kv_heads) * head + model.width * model.heads * head
    attention += model.qkv_bias * (turned + model.kv_heads) * head + model.qk_norm * 2 * head
    each = attention + 3 * model.ffn * model.width + 2 * model.width
    ends = (layers.start == 0) * model.vocabulary * model.width
    once = model.tied and layers.start == 0  # the head is the embedding, which is here
    ends += (layers.stop == model.layers) * ((not once) * model.vocabulary + 1) * model.width
    return len(layers) * each + ends


def activations(model: Model, layers: range, tokens: int, element: int = FLOAT) -> int:
    """Bytes that the stage keeps of one micro-batch of so many tokens from its F to its B; `element` bytes each."""
    width, kv, q = model.width, model.kv_heads * model.head_size, model.heads * model.head_size
    each = width if model.recompute else 4 * width + 3 * q + 3 * model.ffn + 3 * kv + model.heads + 2
    if model.qk_norm and not model.recompute:
        each += q + kv + model.heads + model.kv_heads
    head = (layers.stop == model.layers) * (model.vocabulary + 2 * width + 3)
    return element * tokens * (len(layers) * each + head + 2 * (layers.start == 0))


def bytes_of(settings: Settings, stage: int) -> dict[str, int]:
    """What a worker of that stage holds at most, without deaths."""
    model, p, o = settings.model, settings.parallel, settings.optimizer
    layers = _layers(settings)[stage]
    weights = FLOAT * parameters(model, layers)  # in bf16 the masters
    rounded = settings.numerics.precision == "bf16"
    element = FLOAT // 2 if rounded else FLOAT
    tokens = p.microbatch_size * model.sequence
    limit = initial_problem(settings).limit(Worker(0, stage))
    in_flight = int(min(limit, p.microbatches))
    int64 = settings.numerics.reproducible and settings.numerics.sums == "int64"
    sums = 2 * weights if int64 else weights  # else float32 or int32
    sent = (stage > 0) + (stage < p.stages - 1)  # boundary tensors a micro-batch, kept until the commit
    return {
        "weights": weights * 3 // 2 if rounded else weights,
        "gradients": 2 * sums,  # the accumulators, and the copy that is summed with the peers'
        "optimizer state": (5 if o.stagger else 2) * weights,  # with the undo copy
        "activations": in_flight * activations(model, layers, tokens, element),
        "replay log": element * p.microbatches * sent * tokens * model.width,
    }


def _all_here(settings: Settings, needs: list[dict[str, int]], workers: int) -> int:
    """Of so many ranks, the first ones: all machines have about the same stages."""
    return sum(PROCESS + sum(needs[rank % settings.parallel.stages].values()) for rank in range(workers))


def _memory() -> float | None:
    """Bytes that this machine, or this container, has."""
    with suppress(OSError, ValueError, IndexError):
        total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024.0
        with suppress(OSError, ValueError):
            total = min(total, float(Path("/sys/fs/cgroup/memory.max").read_text()))
        return total
    return None


def _gpu_memory() -> float | None:
    """Bytes of this machine's first GPU; None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    with suppress(OSError, ValueError, IndexError, subprocess.SubprocessError):
        out = subprocess.run(query, capture_output=True, text=True, timeout=5, check=True).stdout
        return float(out.splitlines()[0]) * 2**20
    return None


def _count(number: int) -> str:
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return str(number)
