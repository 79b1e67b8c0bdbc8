"""The tensors that a worker has sent in steps that are not committed: if the receiver dies, a peer gets them again.

log = ReplayLog()
log.keep(step, ("F", (0, 3), 1), activation)
log.get(step, ("F", (0, 3), 1))        # KeyError if it is not here
log.drop(step)                         # at the commit
log.bytes, log.peak                    # counted as the memory that fault tolerance costs
"""

from __future__ import annotations

from collections.abc import Hashable

import torch


class ReplayLog:
    """Tensors by step and by name (`recycle_schedules.Tensor`: kind, micro-batch, stage). For one thread."""

    def __init__(self) -> None:
        self._tensors: dict[int, dict[Hashable, torch.Tensor]] = {}
        self.bytes = 0  # held now
        self.peak = 0  # most bytes ever held

    def keep(self, step: int, name: Hashable, tensor: torch.Tensor) -> None:
        """Holds a reference: the tensor must not be written to until the step is dropped."""
        held = self._tensors.setdefault(step, {})
        if name in held:
            self.bytes -= held[name].nbytes
        held[name] = tensor
        self.bytes += tensor.nbytes
        self.peak = max(self.peak, self.bytes)

    def get(self, step: int, name: Hashable) -> torch.Tensor:
        """The tensor itself, still the log's. KeyError if it is not held."""
        return self._tensors[step][name]

    def __contains__(self, key: tuple[int, Hashable]) -> bool:
        step, name = key
        return name in self._tensors.get(step, {})

    def steps(self) -> set[int]:
        """The steps of which something is held."""
        return set(self._tensors)

    def drop(self, step: int) -> None:
        """The step is committed, or taken back: nobody will ask for its tensors."""
        self.bytes -= sum(tensor.nbytes for tensor in self._tensors.pop(step, {}).values())
