"""The tensors that a worker has sent in steps that are not committed: if the receiver dies, a peer gets them again.

log = ReplayLog()                      # ReplayLog(on_host=True): in the memory of the host
log.keep(step, ("F", (0, 3), 1), [activation])
log.get(step, ("F", (0, 3), 1))        # KeyError if it is not here
log.drop(step)                         # at the commit
log.bytes, log.peak                    # counted as the memory that fault tolerance costs
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence

import torch


class ReplayLog:
    """By step and by the name of what goes over a boundary (`recycle_schedules.Tensor`: kind, micro-batch, stage): one
    tensor or several. For one thread.

    on_host: a copy there is made beside the compute that follows, in pinned memory. The newest stays on its device as
    well, until the next one is kept: a plan sends each as it is made."""

    def __init__(self, on_host: bool = False) -> None:
        self._on_host = on_host
        self._tensors: dict[int, dict[Hashable, Sequence[torch.Tensor | Parked]]] = {}
        self._newest: tuple[int, Hashable, Sequence[torch.Tensor]] | None = None
        self.bytes = 0  # held now
        self.peak = 0  # most bytes ever held

    def keep(self, step: int, name: Hashable, tensors: Sequence[torch.Tensor]) -> None:
        """Holds references: the tensors must not be written to until the step is dropped."""
        held = self._tensors.setdefault(step, {})
        self.bytes += _nbytes(tensors) - _nbytes(held.get(name, ()))
        held[name] = [Parked(tensor) for tensor in tensors] if self._on_host else tensors
        self._newest = step, name, tensors
        self.peak = max(self.peak, self.bytes)

    def get(self, step: int, name: Hashable) -> Sequence[torch.Tensor]:
        """The tensors themselves, still the log's, or copies on the device they came from. KeyError if they are not
        held."""
        held = self._tensors[step][name]
        if self._newest is not None and self._newest[:2] == (step, name):
            return self._newest[2]
        return [tensor.back() if isinstance(tensor, Parked) else tensor for tensor in held]

    def __contains__(self, key: tuple[int, Hashable]) -> bool:
        step, name = key
        return name in self._tensors.get(step, {})

    def steps(self) -> set[int]:
        """The steps of which something is held."""
        return set(self._tensors)

    def drop(self, step: int) -> None:
        """The step is committed, or taken back: nobody will ask for its tensors."""
        self._newest = None
        self.bytes -= sum(map(_nbytes, self._tensors.pop(step, {}).values()))


class Parked:
    """A copy of a tensor in the memory of the host, made on a stream beside those that compute."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._device = tensor.device
        if tensor.device.type == "cpu":
            self._host, self._copied = tensor.clone(), None
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        beside = _beside(tensor.device)
        beside.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(beside):
            self._host.copy_(tensor, non_blocking=True)
            self._copied = beside.record_event()
        tensor.record_stream(beside)  # its memory is not used again before

    @property
    def nbytes(self) -> int:
        return self._host.nbytes

    def back(self) -> torch.Tensor:
        """On the device again; the host waits until the copy is there."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.to(self._device, copy=True)


@functools.cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _nbytes(tensors: Sequence[torch.Tensor | Parked]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
