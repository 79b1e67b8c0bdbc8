"""The tensors that a worker has sent in steps that are not committed: if the receiver dies, a peer gets them again.

log = ReplayLog()
log.keep(step, ("F", (0, 3), 1), [activation])
log.get(step, ("F", (0, 3), 1))        # KeyError if it is not here
log.drop(step)                         # at the commit
log.bytes, log.peak                    # counted as the memory that fault tolerance costs
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch


class ReplayLog:
    """By step and by the name of what goes over a boundary (`recycle_schedules.Tensor`: kind, micro-batch, stage): one
    tensor or several. For one thread."""

    def __init__(self) -> None:
        self._tensors: dict[int, dict[Hashable, Sequence[torch.Tensor]]] = {}
        self.bytes = 0  # held now
        self.peak = 0  # most bytes ever held

    def keep(self, step: int, name: Hashable, tensors: Sequence[torch.Tensor]) -> None:
        """Holds references: the tensors must not be written to until the step is dropped."""
        held = self._tensors.setdefault(step, {})
        self.bytes += _nbytes(tensors) - _nbytes(held.get(name, ()))
        held[name] = tensors
        self.peak = max(self.peak, self.bytes)

    def get(self, step: int, name: Hashable) -> Sequence[torch.Tensor]:
        """The tensors themselves, still the log's. KeyError if they are not held."""
        return self._tensors[step][name]

    def __contains__(self, key: tuple[int, Hashable]) -> bool:
        step, name = key
        return name in self._tensors.get(step, {})

    def steps(self) -> set[int]:
        """The steps of which something is held."""
        return set(self._tensors)

    def drop(self, step: int) -> None:
        """The step is committed, or taken back: nobody will ask for its tensors."""
        self.bytes -= sum(map(_nbytes, self._tensors.pop(step, {}).values()))


def _nbytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
