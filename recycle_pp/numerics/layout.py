"""All tensors of a stage in one vector: parameters, gradients and optimizer state share the same places.

    layout = Layout({"norm.weight": (64,), "head.weight": (256, 64)})
    flat = layout.zeros(device)
    norm, head = layout.views(flat)

Every tensor begins at a multiple of 64 bytes of float32: the bits of a matrix product may depend on the alignment of
its operands (MKL, odd sizes), and they must be the same in a stage of any size. The gaps stay zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

ALIGNMENT = 16  # elements: 64 bytes of float32


class Layout:
    """Attributes, in order: names, shapes, sizes (elements, with the gap behind them); size, of the whole vector."""

    def __init__(self, shapes: Mapping[str, Sequence[int]]):
        self.names = list(shapes)
        self.shapes = [tuple(shape) for shape in shapes.values()]
        self.sizes = [-(-prod(shape) // ALIGNMENT) * ALIGNMENT for shape in self.shapes]
        self.size = sum(self.sizes)

    def zeros(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(self.size, dtype=dtype, device=device)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors that lie in `flat` (size,), in order."""
        pieces = zip(flat.split(self.sizes), self.shapes, strict=True)
        return [piece[: prod(shape)].view(shape) for piece, shape in pieces]
