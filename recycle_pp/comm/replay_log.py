"""Keeps the tensors that a worker sent in uncommitted steps. If a receiver dies, they are resent to one of its peers.

log = ReplayLog()                      # ReplayLog(on_host=True): in host memory
log.keep(step, ("F", (0, 3), 1), [activation])
log.get(step, ("F", (0, 3), 1))        # raises KeyError if it is not in the log
log.drop(step)                         # at the commit
log.bytes, log.peak                    # memory used for fault tolerance
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence

import torch


class ReplayLog:
    """Tensors by step and by the name of the boundary tensor (`recycle_schedules.Tensor`: kind, micro-batch, stage).
    Not thread-safe.

    on_host: whether to keep copies in pinned host memory, which are made while later ops compute. The tensors of the
    last `keep` also stay on their device until the next `keep`, because a plan sends tensors right after computing
    them."""

    def __init__(self, on_host: bool = False) -> None:
        self._on_host = on_host
        self._tensors: dict[int, dict[Hashable, Sequence[torch.Tensor | Parked]]] = {}
        self._newest: tuple[int, Hashable, Sequence[torch.Tensor]] | None = None
        self.bytes = 0  # bytes of the kept tensors
        self.peak = 0  # maximum of `bytes` so far

    def keep(self, step: int, name: Hashable, tensors: Sequence[torch.Tensor]) -> None:
        """Keeps references to the tensors, which must not be written to until the step is dropped."""
        held = self._tensors.setdefault(step, {})
        self.bytes += _nbytes(tensors) - _nbytes(held.get(name, ()))
        held[name] = [Parked(tensor) for tensor in tensors] if self._on_host else tensors
        self._newest = step, name, tensors
        self.peak = max(self.peak, self.bytes)

    def get(self, step: int, name: Hashable) -> Sequence[torch.Tensor]:
        """The tensors, or copies of them, on their original device. The caller must not change them.

        Raises KeyError if they are not in the log."""
        held = self._tensors[step][name]
        if self._newest is not None and self._newest[:2] == (step, name):
            return self._newest[2]
        return [tensor.back() if isinstance(tensor, Parked) else tensor for tensor in held]

    def __contains__(self, key: tuple[int, Hashable]) -> bool:
        step, name = key
        return name in self._tensors.get(step, {})

    def steps(self) -> set[int]:
        """The steps that have tensors in the log."""
        return set(self._tensors)

    def drop(self, step: int) -> None:
        """Drops the tensors of a committed or reverted step."""
        self._newest = None
        self.bytes -= sum(map(_nbytes, self._tensors.pop(step, {}).values()))


class Parked:
    """A copy of a tensor in host memory, made on a separate stream in parallel with the compute streams."""

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
        tensor.record_stream(beside)  # keeps the memory of `tensor` until the copy is done

    @property
    def nbytes(self) -> int:
        return self._host.nbytes

    def back(self) -> torch.Tensor:
        """The tensor on its original device. Blocks until the copy to the host is done."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.to(self._device, copy=True)


@functools.cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _nbytes(tensors: Sequence[torch.Tensor | Parked]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
