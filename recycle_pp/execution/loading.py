"""Loads what a worker trains: its inputs, stage, optimizer and data, and on a resume their state.

loaded = load(spec, welcome, device, session, kernels)   # raises ValueError, with one sentence for the user
loaded.stage, loaded.optimizer, loaded.batches
read_ahead(settings)                                     # in standby: reads the data before they are needed
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from recycle_schedules import StageMemory

from recycle_pp.config.settings import Control, Settings
from recycle_pp.config.stored_inputs import stored_inputs
from recycle_pp.data.batches import Batches
from recycle_pp.islands.admission import RESUME_SECONDS
from recycle_pp.islands.client import Client
from recycle_pp.model.document_check import refuse_leaks
from recycle_pp.model.measured_memory import measured_memory
from recycle_pp.model.stage import Stage
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.state import checkpoint
from recycle_pp.state.stored import here
from recycle_pp.storage.local_copy import copy, is_copied
from recycle_pp.wire.messages.islands import OuterState
from recycle_pp.wire.messages.lifecycle import WorkerWelcome
from recycle_pp.wire.worker_spec import WorkerSpec

from .activity import Doing
from .compile_caches import compiling
from .emulate import EmulatedOptimizer, EmulatedStage
from .session import Session
from .validation import held_out

_read: dict[str, Batches] = {}  # key from `_of_data` -> data that this process has read in standby


@dataclass(frozen=True)
class Loaded:
    """What a worker trains.

    description       of the run, for its checkpoints, see `checkpoint.describe`
    memory            memory of the stage for each way in which it may run; [] if it was not measured
    island, position  the client of the islands' store, and the island's position in the rounds; None without islands
    """

    stage: Stage
    optimizer: StageOptimizer
    batches: Batches
    description: dict[str, Any]
    memory: list[StageMemory]
    island: Client | None
    position: OuterState | None


def load(
    spec: WorkerSpec, welcome: WorkerWelcome, device: torch.device, session: Session, kernels: dict[str, float]
) -> Loaded:
    """Loads the stage of a new worker process, and its state if the job resumes from a checkpoint.

    kernels: filled with kernel -> seconds of its compilation

    Raises ValueError, with one sentence, if an input cannot be used or does not fit the settings or the checkpoint.
    """
    settings, doing = welcome.settings, session.doing
    restarted = spec.incarnation > 0
    doing.starts("inputs")
    _copy_inputs(settings, restarted, doing)
    doing.starts("model")
    stage, optimizer = _stage(
        settings, welcome.worker.stage, device, welcome.run_dir, doing, kernels, not welcome.joins
    )
    doing.starts("data")
    batches = _read.pop(_of_data(settings), None) or Batches(settings)
    held_out(settings, batches)  # raises ValueError if a validation has too many micro-batches
    description = checkpoint.describe(settings, batches.fingerprint, stage.module.origin)
    path = None
    if welcome.resume:
        doing.starts("state")
        folder = Path(welcome.run_dir) / "checkpoints"
        path = here(settings.checkpoint.store, folder, welcome.resume, lambda: doing.starts("state"))
        checkpoint.refuse_mismatch(path, description)
        optimizer.resume(lambda names: checkpoint.load(path, names))
    island, position = None, None
    if settings.islands.store is not None:
        doing.starts("inputs")
        island = Client(settings, optimizer, session.send)
        position = _position(island, path, restarted or welcome.joins, stage.module.origin)
    memory = measured_memory(stage) if settings.parallel.memory and not settings.model.own else []
    return Loaded(stage, optimizer, batches, description, memory, island, position)


def read_ahead(settings: Settings) -> None:
    """Reads the data, so that `load` need not. Call it in a process whose spec is not known yet."""
    _read[_of_data(settings)] = Batches(settings)


def _of_data(settings: Settings) -> str:
    """A key for the settings that determine the samples. Excludes `control`, which may differ between nodes."""
    return repr(replace(settings, control=Control()))


def _copy_inputs(settings: Settings, restarted: bool, doing: Doing) -> None:
    """Copies data and models from a store to this machine. A restarted worker uses the copies that exist, and needs no
    store. Raises ValueError if an input cannot be copied."""
    for url, small in stored_inputs(settings).items():
        if not restarted or not is_copied(url, small):
            copy(url, small, lambda done, total: doing.starts("inputs"))


def _stage(
    settings: Settings,
    stage: int,
    device: torch.device,
    run_dir: str,
    doing: Doing,
    kernels: dict[str, float],
    filled: bool,
) -> tuple[Stage, StageOptimizer]:
    """Builds the stage and its optimizer. On a GPU also compiles all kernels now, because compiling takes long and no
    other worker waits for this one yet. Raises ValueError if the model cannot be trained with these settings.

    kernels: filled with kernel -> seconds of its compilation
    filled: see `Stage`
    """
    whole = not settings.parallel.copies
    if settings.emulate.mode:
        emulated = EmulatedStage(settings, stage, device, run_dir, filled)
        return emulated, EmulatedOptimizer(settings, emulated, whole)
    real = Stage(settings, stage, device, run_dir, filled)
    optimizer = StageOptimizer(settings, real, whole)
    if device.type == "cuda":
        doing.starts("kernels")
        with compiling(kernels):
            real.warm()
            optimizer.warm()
    if settings.data.masked and not settings.model.own:
        refuse_leaks(real)
    return real, optimizer


def _position(island: Client, path: Path | None, running: bool, origin: str) -> OuterState:
    """The position of the island in the rounds.

    path     the checkpoint from which the job resumes, or None
    running  whether the other workers train already, so that they do not wait for this one
    origin   digest of model.path, see `opening.opened`
    """
    at = checkpoint.position_in(path) if path is not None else None
    patience = math.inf if running else RESUME_SECONDS if path is not None else 0.0
    return island.open(at, patience, None if running or path is not None else origin)
