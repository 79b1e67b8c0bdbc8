"""The initial moments of a unit: zero, or those of a checkpoint.

moments = InitialMoments(layout, device)             # zero
moments = InitialMoments(layout, device, load)       # those of a checkpoint
mean, square = moments.of(unit)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .held import VECTORS, empty
from .layout import Layout

Load = Callable[[list[str]], Mapping[str, Tensor]]  # tensors of a checkpoint, by name


class InitialMoments:
    """Reads a tensor of the checkpoint when the first of its units is requested, and keeps the tensor until a unit of
    another tensor is requested."""

    def __init__(self, layout: Layout, device: torch.device, load: Load | None = None) -> None:
        self._layout = layout
        self._device = device
        self._load = load
        self._newest: dict[str, tuple[str, Tensor]] = {}  # vector -> name and value of the tensor read last

    def of(self, unit: int) -> tuple[Tensor, Tensor]:
        """The means and the mean squares of a unit's gradients: flat float32, new memory."""
        _, mean, square = VECTORS
        return self._moment(mean, unit), self._moment(square, unit)

    def _moment(self, vector: str, unit: int) -> Tensor:
        layout = self._layout
        span, of = layout.spans[unit], layout.units[unit]
        flat = empty(span.stop - span.start, self._device).zero_()
        if self._load is not None:
            key = f"{vector}.{layout.names[of.tensor]}"
            if vector not in self._newest or self._newest[vector][0] != key:
                self._newest[vector] = key, self._load([key])[key]
            tensor = self._newest[vector][1].view(layout.rows[of.tensor], -1)
            layout.matrix(unit, flat).copy_(tensor[of.rows])
        return flat
