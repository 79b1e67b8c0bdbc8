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

    def first(self, size: int) -> Layout:
        """Of the first `size` elements, a multiple of ALIGNMENT: a tensor that is cut there has what is left of it as a
        matrix or a vector, as the whole is."""
        shapes: dict[str, Sequence[int]] = {}
        left = size
        for name, shape, length in zip(self.names, self.shapes, self.sizes, strict=True):
            if left >= length:
                shapes[name] = shape
            elif left > 0:
                shapes[name] = (left // ALIGNMENT, ALIGNMENT) if len(shape) >= 2 else (left,)
            left -= length
        return Layout(shapes)

    def zeros(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(self.size, dtype=dtype, device=device)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors that lie in `flat` (size,), in order."""
        pieces = zip(flat.split(self.sizes), self.shapes, strict=True)
        return [piece[: prod(shape)].view(shape) for piece, shape in pieces]
