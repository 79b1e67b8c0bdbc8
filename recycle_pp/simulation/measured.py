"""The job of a measured run, from its profile.json.

job = job_of("runs/mine", microbatches=32)           # a run folder, or its profile.json
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from recycle_schedules import OpKind
from recycle_schedules.layers import TIMES

from recycle_pp.fitting.layer_values import relaid
from recycle_pp.model.memory import stage_memory
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.wire.files import UnreadableFile, decode, read
from recycle_pp.wire.records import Count, Seconds

from .job import Job, even


class _Measured(TypedDict):
    """The keys of profile.json that are used. The file may be written by hand."""

    durations_seconds: dict[Literal["F", "I", "W", "B", "O"], list[Seconds]]
    message_seconds: NotRequired[Seconds]
    sum_seconds: NotRequired[Seconds | list[Seconds]]
    layout: NotRequired[list[Count]]


def job_of(
    path: str | Path, *, pipelines: int | None = None, stages: int | None = None, microbatches: int | None = None,
    layers: int | None = None, worker_bytes: float | None = None, memory: Any = None, optimizer: str = "staggered",
) -> Job:  # fmt: skip
    """The measured job. Arguments that are None come from config.yaml beside the profile.

    Raises:
        ValueError: a file is missing or damaged, or `stages` differs from the measured number.
    """
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    profile = folder / "profile.json" if Path(path).is_dir() else Path(path)
    try:
        measured = decode(profile, read(profile), _Measured)
    except FileNotFoundError:
        raise ValueError(f"--profile {path}: no profile.json with measured durations") from None
    durations: dict[str, list[float]] = {k: times for k, times in measured["durations_seconds"].items() if k in TIMES}
    if len(durations) < 4 or len({len(times) for times in durations.values()} | {0}) != 2:
        raise UnreadableFile(profile, "durations_seconds must give F, I, W and O, each for every stage")
    message, sums = measured.get("message_seconds", 0.0), measured.get("sum_seconds", 0.0)
    run = RunFolder(folder)
    if run.config.exists():
        settings = run.read_settings()
        p, model = settings.parallel, settings.model
        pipelines, microbatches = pipelines or p.pipelines, microbatches or p.microbatches
        tokens = pipelines * microbatches * p.microbatch_size * model.sequence
        if model.own and isinstance(model.layers, int):
            layers = layers or model.layers
            memories = [stage_memory(settings, stage) for stage in range(p.stages)]
            worker_bytes = worker_bytes or max(memory.weights + memory.state for memory in memories)
    else:
        tokens = 0
    measured_stages = len(durations[OpKind.FORWARD])
    if stages not in (None, measured_stages):
        raise ValueError(f"--stages {stages}: the profile has {measured_stages} stages")
    if layout := tuple(measured.get("layout", ())):  # layout when measured; the simulated job starts with an even one
        if len(layout) != measured_stages or min(layout) < 1:
            raise UnreadableFile(profile, "layout must give the number of layers of every stage")
        start = even(sum(layout), measured_stages)
        durations = {kind: relaid(times, layout, start) for kind, times in durations.items()}
    if pipelines is None or microbatches is None:
        raise ValueError("--pipelines and --microbatches are needed: there is no config.yaml next to the profile")
    return Job.of(
        pipelines=pipelines, stages=measured_stages, microbatches=microbatches, layers=layers or 96,
        durations=durations, worker_bytes=worker_bytes or 16e9, memory=memory, optimizer=optimizer,
        tokens=tokens, send=message, allreduce=sums,
        source=f"measured: {profile}",
    )  # fmt: skip
