"""The values that training begins with, read by name: of a folder of safetensors, or of a seed checkpoint.

    values = initial_values(source, settings, run_dir)
    values.read("blocks.0.up.weight")       # that tensor alone
    values.find("blocks.0.mask")            # None if there is none, as of buffers that are computed

What has no file is built once on the CPU, whole, with `run.seed`, by whichever worker of a machine comes first, and
written to RUN_DIR/seed.pt; the others wait for it. So any split, and any worker, begins with the same values. What does
not fit into memory needs a folder.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from recycle_pp.config.settings import Settings
from recycle_pp.model.safetensors_folder import Folder

from .source import Source


class Values(Protocol):
    def read(self, name: str) -> Tensor:
        """ValueError: there is no such tensor; one sentence for the user."""
        ...

    def find(self, name: str) -> Tensor | None: ...


def initial_values(source: Source, settings: Settings, run_dir: str | Path | None) -> Values:
    """run_dir: None keeps the seed checkpoint in memory."""
    if source.folder is not None:
        return Folder(source.folder, source.prefix)
    if run_dir is None:
        return Built(seeded(source, settings.run.seed))
    path = Path(run_dir) / "seed.pt"
    with (Path(run_dir) / "seed.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until this worker dies, at the latest
        if not path.exists():
            temporary = path.with_suffix(".tmp")
            torch.save(seeded(source, settings.run.seed), temporary)
            os.replace(temporary, path)
    return Built(torch.load(path, mmap=True, weights_only=True))


def seeded(source: Source, seed: int) -> dict[str, Tensor]:
    """Every parameter and buffer of the model as it is built in float32 after `torch.manual_seed(seed)`, by its
    names."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = source.build(torch.float32)
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


class Built:
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def find(self, name: str) -> Tensor | None:
        return self._tensors.get(name)
