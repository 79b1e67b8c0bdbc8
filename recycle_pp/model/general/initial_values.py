"""The initial values of a model, read by name from a folder of safetensors or from a seed checkpoint.

    values = initial_values(source, settings, run_dir)
    values.read("blocks.0.up.weight")       # only that tensor
    values.find("blocks.0.mask")            # None if missing, for instance for computed buffers

Without a folder, the first worker of a machine builds the whole model on the CPU with `run.seed` and writes
RUN_DIR/seed.pt. The other workers wait for that file, so the initial values are the same for every split and worker. A
model that does not fit into memory needs a folder. Each worker draws the adapters (`lora`) itself.
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

from .empty import empty
from .lora import Adapted, drawn
from .source import Source, source_of


class Values(Protocol):
    def read(self, name: str) -> Tensor:
        """The tensor `name`. Raises ValueError, with one sentence for the user, if a folder lacks it."""
        ...

    def find(self, name: str) -> Tensor | None: ...


def initial_values(source: Source, settings: Settings, run_dir: str | Path | None) -> Values:
    """The initial values of the model. run_dir: folder for the seed checkpoint; None: the values stay in memory."""
    if source.folder is not None:
        folder = Folder(source.folder, source.prefix)
        if not settings.model.lora.rank:
            return folder
        bare = empty(source_of(settings.with_values({"model.lora.rank": 0})))
        return Adapted(folder, drawn(bare, settings.model, settings.run.seed))
    if run_dir is None:
        return Built(seeded(source, settings.run.seed))
    path = Path(run_dir) / "seed.pt"
    with (Path(run_dir) / "seed.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released at the latest when this worker dies
        if not path.exists():
            temporary = path.with_suffix(".tmp")
            torch.save(seeded(source, settings.run.seed), temporary)
            os.replace(temporary, path)
    return Built(torch.load(path, mmap=True, weights_only=True))


def seeded(source: Source, seed: int) -> dict[str, Tensor]:
    """Every parameter and buffer of the model, built in float32 after `torch.manual_seed(seed)`, by name."""
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
