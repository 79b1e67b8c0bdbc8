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
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from recycle_pp.config.settings import Settings

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


class Folder:
    """The safetensors of a Hugging Face folder. Only what is asked for is read.

    prefix: files of the bare model (`wte.weight`) leave it out of the names (`transformer.wte.weight`).
    """

    def __init__(self, path: Path, prefix: str = "") -> None:
        self._path, self._prefix = path, f"{prefix}." if prefix else ""
        index, single = path / "model.safetensors.index.json", path / "model.safetensors"
        if index.exists():
            self._files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        elif single.exists():
            with _opened(single) as file:
                self._files = dict.fromkeys(file.keys(), single.name)
        else:
            raise ValueError(
                f"model.path={path} holds no model.safetensors; model.init=random trains from the beginning"
            )

    def read(self, name: str) -> Tensor:
        found = self.find(name)
        if found is None:
            some = ", ".join(sorted(self._files)[:3])
            raise ValueError(
                f"model.path={self._path} holds no {name} (but {some}, ...): transformers converts such files as it "
                "loads them; write the folder anew with from_pretrained and save_pretrained(save_original_format=False)"
            )
        return found

    def find(self, name: str) -> Tensor | None:
        for candidate in (name, name.removeprefix(self._prefix)):
            if candidate in self._files:
                with _opened(self._path / self._files[candidate]) as file:
                    return file.get_tensor(candidate)
        return None


def _opened(path: Path):  # type: ignore[no-untyped-def]
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ValueError("reading safetensors needs the package: pip install 'recycle-pp[hf]'") from error
    return safe_open(path, framework="pt")
