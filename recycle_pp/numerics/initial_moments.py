"""The initial state vectors of a unit: zeros (theta: the weights), or the values in a checkpoint.

moments = InitialMoments(tensors)                    # zeros
moments = InitialMoments(tensors, load)              # values that `load` reads from a checkpoint
vectors = moments.of(unit)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from .held import empty
from .layer_tensors import LayerTensors
from .outer_state import THETA, WIDTH, outer_vectors

Load = Callable[[list[str]], Mapping[str, Tensor]]  # tensors of a checkpoint, by name


class InitialMoments:
    """The initial vectors of each unit.

    Reads a tensor of the checkpoint when the first of its units is requested, and keeps it until a unit of another
    tensor is requested.
    """

    def __init__(self, tensors: LayerTensors, load: Load | None = None) -> None:
        self._tensors, self._load = tensors, load
        self._newest: dict[str, tuple[str, Tensor]] = {}  # vector -> (name, value) of the last tensor that was read

    def of(self, unit: int) -> list[Tensor]:
        """New flat tensors with the initial values of the unit's state vectors. The master is not among them."""
        rule = self._tensors.rule_of(unit)
        outer = outer_vectors(self._tensors.settings)
        return [
            *(self._vector(name, rule.width, unit) for name in rule.vectors),
            *(self._vector(name, WIDTH, unit) for name in outer),
        ]

    def _vector(self, vector: str, width: int, unit: int) -> Tensor:
        layout = self._tensors.layout
        span, of = layout.spans[unit], layout.units[unit]
        flat = empty(span.stop - span.start, self._tensors.device, width).zero_()
        if vector == THETA and self._load is None:
            return flat.copy_(self._tensors.flat[span])
        if self._load is not None:
            key = f"{vector}.{layout.names[of.tensor]}"
            if vector not in self._newest or self._newest[vector][0] != key:
                self._newest[vector] = key, self._load([key])[key]
            tensor = self._newest[vector][1].view(layout.rows[of.tensor], -1)
            layout.matrix(unit, flat).copy_(tensor[of.rows])
        return flat
