"""Durations and sizes of a job that has never run, from a model's shape and a GPU's data sheet.

job = job_on("gpt124m", "a100", pipelines=6, stages=4, microbatches=32, microbatch_size=4)
"""

from __future__ import annotations

from typing import Any, NamedTuple

from recycle_schedules import Problem
from recycle_schedules.op_kinds import SPLIT

from recycle_pp.config.compose import compose
from recycle_pp.model.memory import parameters

from .job import Job


class Gpu(NamedTuple):
    """A GPU's data sheet from NVIDIA. flops: dense bf16 (V100, T4: fp16) operations per second. memory: bytes."""

    flops: float
    memory: float


GPUS = {
    "t4": Gpu(65e12, 16e9),
    "v100": Gpu(125e12, 32e9),
    "a10": Gpu(125e12, 24e9),
    "l4": Gpu(121e12, 24e9),
    "l40s": Gpu(362e12, 48e9),
    "a100": Gpu(312e12, 80e9),
    "h100": Gpu(989e12, 80e9),
    "h200": Gpu(989e12, 141e9),
    "b200": Gpu(2250e12, 180e9),
}
STATE = 12
"""Bytes of state per parameter that a joining worker receives: a float32 weight and its two moments."""


def job_on(
    model: str, gpu: str, *, pipelines: int, stages: int, microbatches: int, microbatch_size: int = 1,
    utilization: float = 0.4, worker_bytes: float | None = None, memory: Any = None, optimizer: str = "staggered",
) -> Job:  # fmt: skip
    """A job that trains the preset `model=NAME` on this GPU. Embedding and head count as layers.

    Each of F, I and W takes 2 operations per parameter and token, and a third of all operations of the attention.

    utilization: share of the data sheet's operations per second that F, I and W reach
    worker_bytes: mean bytes of a worker's state. None: STATE bytes per parameter

    Raises ValueError for an unknown model or GPU.
    """
    if gpu not in GPUS:
        raise ValueError(f"--gpu must be one of {', '.join(GPUS)}, not {gpu!r}")
    if not 0 < utilization <= 1:
        raise ValueError("--utilization must be above 0 and at most 1")
    m = compose([f"model={model}"]).model
    if not m.own or not isinstance(m.layers, int):
        raise ValueError(f"--model {model}: must be one of the project's own models, whose sizes are known")
    tokens = microbatch_size * m.sequence
    inner = parameters(m, range(1, 2)) if m.layers > 2 else parameters(m, range(m.layers)) / m.layers
    ends = m.vocabulary * m.width
    attention = 2 * m.sequence * tokens * m.heads * m.head_size  # scores and values; half of them are masked
    rate = GPUS[gpu].flops * utilization
    each = (2 * inner * tokens + attention) / rate
    times = [0.0, *[each] * m.layers, 2 * ends * tokens / rate]
    parts = (ends, *[inner] * m.layers, ends)
    each_parameter = STATE if worker_bytes is None else worker_bytes * stages / sum(parts)
    sizes = [each_parameter * float(n) for n in parts]
    problem = Problem(
        pipelines=pipelines, stages=stages, microbatches=microbatches, memory_limit=memory, optimizer=optimizer,
        layers=dict.fromkeys(SPLIT, times) | {"bytes": sizes},
    )  # fmt: skip
    source = f"model={model} on {gpu}, {utilization:.0%} of its data sheet's operations"
    return Job(problem, tuple(sizes), pipelines * microbatches * tokens, source)
