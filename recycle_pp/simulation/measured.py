"""The job of a run that was measured: what its profile.json says.

job = job_of("runs/mine", microbatches=32)           # a run folder, or its profile.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recycle_pp.config.settings import Settings, load
from recycle_pp.model.memory import stage_memory

from .job import Job


def job_of(
    path: str | Path, *, pipelines: int | None = None, stages: int | None = None, microbatches: int | None = None,
    layers: int | None = None, worker_bytes: float | None = None, memory: Any = None, optimizer: str = "staggered",
) -> Job:  # fmt: skip
    """What is not given is as in the run's configuration beside the profile. ValueError with one sentence where one of
    both is missing, or if `stages` is another number than was measured."""
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    profile = folder / "profile.json" if Path(path).is_dir() else Path(path)
    try:
        measured = json.loads(profile.read_text())
        durations = {kind: [float(t) for t in measured["durations_seconds"][kind]] for kind in "FIWO"}
        message, sums = float(measured.get("message_seconds", 0)), measured.get("sum_seconds", 0)
    except (OSError, ValueError, LookupError, TypeError):
        raise ValueError(f"--profile {path}: no profile.json with measured durations") from None
    config = folder / "config.yaml"
    if config.exists():
        import yaml

        settings: Settings = load(yaml.safe_load(config.read_text()))
        p, model = settings.parallel, settings.model
        pipelines, microbatches = pipelines or p.pipelines, microbatches or p.microbatches
        tokens = pipelines * microbatches * p.microbatch_size * model.sequence
        if model.own and isinstance(model.layers, int):
            layers = layers or model.layers
            memories = [stage_memory(settings, stage) for stage in range(p.stages)]
            worker_bytes = worker_bytes or max(memory.weights + memory.state for memory in memories)
    else:
        tokens = 0
    measured_stages = len(durations["F"])
    if stages not in (None, measured_stages):
        raise ValueError(f"--stages {stages}: the profile has {measured_stages}")
    if pipelines is None or microbatches is None:
        raise ValueError("--pipelines and --microbatches are needed: there is no config.yaml beside the profile")
    return Job.of(
        pipelines=pipelines, stages=measured_stages, microbatches=microbatches, layers=layers or 96,
        durations=durations, worker_bytes=worker_bytes or 16e9, memory=memory, optimizer=optimizer,
        tokens=tokens, send=message, allreduce=sums,
        source=f"measured: {profile}",
    )  # fmt: skip
