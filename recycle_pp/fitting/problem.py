"""Builds the planner's Problem of a job from its settings.

problem = initial_problem(settings)                  # all workers live; durations are unknown before the profile
problem = with_less_memory(problem, Worker(1, 2), 4)    # after it ran out of memory with 4 micro-batches in flight
problem = relaid_problem(problem, settings, (2, 2), (1, 3))     # the same job with different boundaries between stages
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from recycle_schedules import OpKind, Problem, Worker
from recycle_schedules.layers import TIMES, Layout

from recycle_pp.config.settings import Settings
from recycle_pp.config.sizes import parse_size
from recycle_pp.model.memory import layers_of_stages, room_for_tensors, stage_memory

from .layer_values import relaid
from .machine import gpu_memory

Measured = Sequence[Sequence[Mapping[str, float]]]
"""For each stage, two sets of a StageMemory's fields in bytes: without recomputing, and with it."""


def initial_problem(settings: Settings) -> Problem:
    """The problem of a step with all workers.

    With emulated compute, durations are those of `emulate`, scaled by the number of layers of each stage. Otherwise
    they are 1 until they are measured, and 0 for W if only adapters (LoRA) are trained.
    """
    s, e = settings.schedule, settings.emulate
    known: dict[str, Any] = {kind: getattr(e, kind) if e.mode else 1.0 for kind in TIMES}
    if settings.model.lora.rank and not e.mode:
        known[OpKind.BACKWARD_WEIGHT] = 0.0  # frozen weights have no gradients, and those of adapters are small
    shares = shares_of_stages(settings)
    if e.mode and {*shares} != {1.0}:
        known = {kind: [seconds * share for share in shares] for kind, seconds in known.items()}
    profiling = s.profile_steps > 0 and not e.mode
    return Problem(
        pipelines=settings.parallel.pipelines,
        stages=settings.parallel.stages,
        microbatches=settings.parallel.microbatches,
        durations=known,
        backward="decoupled" if profiling else s.backward,
        optimizer="staggered" if settings.optimizer.stagger else "barrier",
        memory_limit=None if s.memory_extra is None else {"base": "1f1b", "extra": s.memory_extra},
        memory=memory_of(settings),
        reroute=s.reroute,
    )


def shares_of_stages(settings: Settings) -> list[float]:
    """The number of layers of each stage, divided by the mean over the stages. 1.0 if the numbers are unknown."""
    stages, layout = settings.parallel.stages, settings.model.layout
    if settings.model.own:
        layout = [len(layers) for layers in layers_of_stages(settings)]
    return [count * stages / sum(layout) for count in layout] if layout else [1.0] * stages


def memory_of(settings: Settings, measured: Measured | None = None) -> dict[str, Any] | None:
    """The value of the problem's key `memory`; None without `parallel.memory`, or if the bytes of stages are unknown.

    measured: bytes that the workers have measured (`model.measured_memory`), for a model that is not the project's own

    One micro-batch in flight is always allowed, because a job that may run out of memory is better than a job that
    cannot start.
    """
    capacity = settings.parallel.memory
    if capacity in (None, "auto") or settings.emulate.mode or (not settings.model.own and measured is None):
        return None
    device = device_of(settings)
    memory: dict[str, Any] = {"capacity": room_for_tensors(parse_size(str(capacity)), device), "least": 1}
    auto = settings.model.recompute == "auto"
    modes = (False, True) if auto else (None,)
    found = measured or [
        [asdict(stage_memory(settings, s, device=device, recompute=again)) for again in modes]
        for s in range(settings.parallel.stages)
    ]
    return memory | dict(zip(("stages", "recomputed"), map(list, zip(*found, strict=True)), strict=False))


def device_of(settings: Settings) -> str:
    """The device of the workers, cpu or cuda, on the assumption that their machines are like this one."""
    return "cpu" if settings.run.device == "cpu" or gpu_memory() is None else "cuda"


def with_less_memory(problem: Problem, worker: Worker, in_flight: float) -> Problem:
    """A copy of the problem in which `worker` may have one micro-batch fewer in flight, but no fewer than one.

    in_flight: the most micro-batches that it had in flight. inf if that is unknown, for a limit below that of 1F1B

    Other workers keep their limits. Limits in bytes do not change.
    """
    limits = {}
    for d in range(problem.pipelines):
        for s in range(problem.stages):
            limit = problem.limit(Worker(d, s))
            if Worker(d, s) == worker:
                limit = (problem.stages - s if in_flight == math.inf else in_flight) - 1
            elif limit == math.inf:
                limit = problem.stages - s + problem.total
            limits[f"{d},{s}"] = max(1, int(limit))
    return problem.replace(memory_limit={"per_worker": limits})


def relaid_problem(problem: Problem, settings: Settings, before: Layout, after: Layout) -> Problem:
    """The problem in another layout, with predicted durations and with the memory of its stages.

    settings: with `model.split` of the layout `after`
    """
    if before == after:
        return problem

    def moved(value: float | Sequence[float]) -> list[float]:
        return relaid([value] * problem.stages if isinstance(value, int | float) else value, before, after)

    durations = {kind: moved(value) for kind, value in problem.durations.items()}
    allreduce = moved(problem.allreduce) if problem.allreduce else None
    return problem.replace(durations=durations, allreduce=allreduce, memory=memory_of(settings))
