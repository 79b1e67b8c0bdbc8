"""The tensors of a model that no checkpoint contains: frozen parameters and persistent buffers.

has_all(trained, run_dir)                      # whether it is already clear that there are no such tensors
rest = Untrained(settings, trained, run_dir)   # trained: the names in the checkpoint
rest.frozen                                    # name -> shape
rest.buffers                                   # name -> tensor, as in the model's state_dict
rest.read("embedding.weight")                  # a frozen parameter
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from recycle_pp.config.settings import Settings
from recycle_pp.model.safetensors_folder import Folder
from recycle_pp.storage.local_copy import copy, is_stored

from .empty import empty
from .initial_values import Built, Values, seeded
from .source import source_of


def has_all(trained: Collection[str], run_dir: Path) -> bool:
    """Whether RUN_DIR/seed.pt contains only tensors in `trained`. Does not need the user's code."""
    seed = run_dir / "seed.pt"
    return seed.is_file() and torch.load(seed, mmap=True, weights_only=True).keys() <= {*trained}


class Untrained:
    """The initial values of these tensors, read on demand from `model.path`, else from RUN_DIR/seed.pt. If the run
    folder has no such file, the model is built again with `run.seed`.

    model   the model without memory

    Raises ValueError if the model cannot be built.
    """

    def __init__(self, settings: Settings, trained: Collection[str], run_dir: Path) -> None:
        self._settings, self._seed = settings, run_dir / "seed.pt"
        if settings.model.path is not None and is_stored(settings.model.path):
            copy(settings.model.path, small=True)
        try:
            self._source = source_of(settings)
        except ValueError as error:
            raise ValueError(
                f"{error}; this command needs the model's code, for buffers and frozen parameters"
            ) from error
        self.model: nn.Module = empty(self._source)
        tensors = {name: of for name, of in self.model.state_dict(keep_vars=True).items() if isinstance(of, Tensor)}
        names: dict[int, list[str]] = {}  # the names of a tied tensor
        for name, tensor in tensors.items():
            names.setdefault(id(tensor), []).append(name)
        self._names = {name: names[id(tensor)] for name, tensor in tensors.items()}
        self.frozen = {
            name: tuple(parameter.shape)
            for name, parameter in self.model.named_parameters()
            if not {*trained}.intersection(self._names[name])
        }
        self.buffers = {name: self._buffer(name, b) for name, b in tensors.items() if not isinstance(b, nn.Parameter)}

    def read(self, name: str) -> Tensor:
        found = self._find(name)
        return self._values.read(name) if found is None else found

    def _buffer(self, name: str, built: Tensor) -> Tensor:
        """The value with which `Part` trains, before it is rounded to the dtype of the computation."""
        found = self._find(name)
        return built if found is None or found.shape != built.shape else found

    def _find(self, name: str) -> Tensor | None:
        return next((value for of in self._names[name] if (value := self._values.find(of)) is not None), None)

    @cached_property
    def _values(self) -> Values:
        if self._source.folder is not None:
            path = self._settings.model.path
            if path is not None and is_stored(path):
                copy(path)
            return Folder(self._source.folder, self._source.prefix)
        if self._seed.is_file():
            return Built(torch.load(self._seed, mmap=True, weights_only=True))
        return Built(seeded(self._source, self._settings.run.seed))
