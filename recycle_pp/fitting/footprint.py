"""Describes the size of a run: its parameters, the tokens per step and the memory of each worker.

    for line in footprint(settings, workers_here=4): print(line)

All figures are known before any worker starts. `model.memory` estimates the bytes for a step without deaths. The peers
of a dead worker need more, because they run its micro-batches and keep its boundary tensors.
"""

from __future__ import annotations

import os

from recycle_schedules import Problem, Worker

from recycle_pp.config.checks import int32_bits
from recycle_pp.config.settings import Settings
from recycle_pp.config.sizes import format_size
from recycle_pp.linux.memory import host_memory
from recycle_pp.model.memory import PROCESS, layers_of_stages, parameters, stage_memory

from .machine import gpu_memory
from .problem import initial_problem


def footprint(settings: Settings, workers_here: int) -> list[str]:
    """The sentences. workers_here: number of workers on this machine.

    For a model that is not the project's own, returns only the size of a step, because only workers can measure the
    model's memory.
    """
    p = settings.parallel
    samples = p.pipelines * p.microbatches * p.microbatch_size
    each_step = f"each step: {samples} sample{'s' * (samples != 1)}, {samples * settings.model.sequence:,} tokens"
    if not settings.model.own:
        return [each_step]
    count = sum(parameters(settings.model, layers) for layers in layers_of_stages(settings))
    lines = [f"{_count(count)} parameters in {p.stages} stage{'s' * (p.stages != 1)}; {each_step}"]
    if settings.numerics.sums == "int32":
        terms = p.pipelines * p.microbatches
        lines.append(
            f"sums of {terms} gradients in int32: the largest element of a row keeps {int32_bits(terms)} bits "
            "(bench/sums.py measures the error)"
        )
    if settings.emulate.mode:
        return lines
    gpu = None if settings.run.device == "cpu" else gpu_memory(workers_here)
    needs = needs_of(settings, "cpu" if gpu is None else "cuda")
    stage = max(range(p.stages), key=lambda s: sum(needs[s].values()))
    parts = ", ".join(f"{name} {format_size(size)}" for name, size in needs[stage].items() if size)
    most = sum(needs[stage].values())
    lines.append(f"a worker of stage {stage}, the fullest, needs about {format_size(most)}: {parts}")
    need, have = (most, gpu) if gpu is not None else (_all_here(settings, needs, workers_here), host_memory())
    ours = "the worker" if workers_here == 1 else f"the {workers_here} workers"
    here = f"{ours} of this machine, torch included, may need {format_size(need)}; it has"
    where = "its share of its GPU has" if gpu is not None else here
    if have is not None:
        lines.append(f"{where} {format_size(have)}" + (": that is not enough" if need > have else ""))
    if settings.parallel.memory is not None:
        lines.append(_in_flight(settings))
    crowded = crowd(workers_here) if gpu is None else None
    return [*lines, crowded] if crowded else lines


def _in_flight(settings: Settings) -> str:
    """A sentence with the number of micro-batches in flight that `parallel.memory` allows on each stage."""
    problem = _after_the_profile(settings)
    counted = problem.replace(memory=None)
    stages = range(problem.stages)
    limits = [min(problem.limit(Worker(0, s)), problem.counts[0]) for s in stages]
    wanted = [min(counted.limit(Worker(0, s)), problem.counts[0]) for s in stages]
    room = f"parallel.memory={settings.parallel.memory}: micro-batches in flight by stage: "
    said = room + ", ".join(
        f"{n:g}" if n == most else f"{n:g} of {most:g}" for n, most in zip(limits, wanted, strict=True)
    )
    if again := [str(s) for s in stages if problem.recomputes[s]]:
        said += f"; stage{'s' * (len(again) > 1)} {', '.join(again)} recompute{'s' * (len(again) == 1)}"
    strict = {**problem.memory, "least": 0} if problem.memory else None
    try:
        problem.replace(memory=strict)
    except ValueError:
        return f"{said}; not even one fits"
    return said


def crowd(workers_here: int) -> str | None:
    """A warning if there are more workers than cores, otherwise None."""
    cores = os.cpu_count() or 1
    if workers_here <= cores:
        return None
    return f"{workers_here} workers share {'1 core' if cores == 1 else f'{cores} cores'}: times are measured on the CPU"


def needs_of(settings: Settings, device: str) -> list[dict[str, float]]:
    """For each stage, the bytes of each part of a worker's memory at its peak in a step without deaths.

    device: cpu or cuda
    """
    problem, p = _after_the_profile(settings), settings.parallel
    found = []
    for stage, again in enumerate(problem.recomputes):
        memory = stage_memory(settings, stage, device=device, recompute=again or None)
        most = min(problem.limit(Worker(0, stage)), p.microbatches)
        found.append(memory.peak(p.pipelines, p.microbatches, most, problem.coupled[stage]))
    return found


def _after_the_profile(settings: Settings) -> Problem:
    return initial_problem(settings).replace(backward=settings.schedule.backward)


def _all_here(settings: Settings, needs: list[dict[str, float]], workers: int) -> float:
    """Bytes that the workers on this machine need, as if they had the first `workers` ranks of the job."""
    return sum(PROCESS + sum(needs[rank % settings.parallel.stages].values()) for rank in range(workers))


def _count(number: int) -> str:
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return str(number)
