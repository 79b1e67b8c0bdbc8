"""All tensors of a stage in one vector: parameters, gradients and optimizer state share the same places.

    layout = Layout({"norm.weight": (64,), "head.weight": (256, 64)})
    flat = layout.zeros(device)
    norm, head = layout.views(flat)
    for block in layout.blocks_of(flat): ...        # what one norm and one exponent are computed over

Every tensor begins at a multiple of 256 bytes, also as bfloat16: the bits of a matrix product may depend on the
alignment of its operands (MKL on a CPU; cuBLAS looks at up to 256 bytes), and they must be the same in a stage of any
size. The gaps stay zero.

A tensor is seen as a matrix: a row is its fewest last dimensions that have `ROW` elements together, so a vector is one
row. A block is whole rows of one tensor, about `BLOCK` elements, at a multiple of 256 bytes. Which blocks there are
follows from a tensor's shape alone, not from the stage that holds it nor from who lives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd, prod

import torch
from torch import Tensor

from recycle_pp.comm.tensor_bytes import ALIGNMENT as BYTES
from recycle_pp.comm.tensor_bytes import aligned_bytes

ALIGNMENT = BYTES // 2  # elements: 256 bytes of bfloat16, 512 of float32
BLOCK = 1 << 20  # elements of a block, at most, where a row has not more
ROW = 16  # elements of a row, at least, where the tensor has as many


@dataclass(frozen=True)
class Block:
    """Rows `rows` of tensor number `tensor`."""

    tensor: int
    rows: slice


class Layout:
    """Attributes, in order: names, shapes, sizes (elements, with the gap behind them), rows (of each tensor), blocks;
    size, of the whole vector."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], block: int = BLOCK):
        self.names = list(shapes)
        self.shapes = [tuple(shape) for shape in shapes.values()]
        self.sizes = [-(-prod(shape) // ALIGNMENT) * ALIGNMENT for shape in self.shapes]
        self.size = sum(self.sizes)
        self.rows = [rows_of(shape) for shape in self.shapes]
        self.blocks = [
            Block(index, slice(first, min(first + step, rows)))
            for index, (shape, rows) in enumerate(zip(self.shapes, self.rows, strict=True))
            for step in [_rows_of_a_block(prod(shape) // rows if rows else 1, block)]
            for first in range(0, rows, step)
        ]

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
        """The vector (size,), at a multiple of 256 bytes."""
        return aligned_bytes(self.size * dtype.itemsize, device).view(dtype).zero_()

    def room(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The same with nothing in it but the zeros behind each tensor: on a CPU it takes memory as it is written."""
        flat = aligned_bytes(self.size * dtype.itemsize, device).view(dtype)
        for piece, shape in zip(flat.split(self.sizes), self.shapes, strict=True):
            piece[prod(shape) :].zero_()
        return flat

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors that lie in `flat` (size,), in order."""
        pieces = zip(flat.split(self.sizes), self.shapes, strict=True)
        return [piece[: prod(shape)].view(shape) for piece, shape in pieces]

    def blocks_of(self, flat: Tensor) -> list[Tensor]:
        """The blocks that lie in `flat` (size,), in order, each (rows, columns)."""
        matrices = [view.view(rows, -1) for view, rows in zip(self.views(flat), self.rows, strict=True)]
        return [matrices[block.tensor][block.rows] for block in self.blocks]

    @property
    def rows_of_blocks(self) -> list[int]:
        """How many rows each block has."""
        return [block.rows.stop - block.rows.start for block in self.blocks]

    @property
    def spans(self) -> list[slice]:
        """The elements of the vector that each block takes, the gap behind a tensor's last one included. They have no
        gap between them, and begin and end at multiples of `ALIGNMENT`."""
        ends = list(accumulate(self.block_sizes))
        return [slice(end - size, end) for end, size in zip(ends, self.block_sizes, strict=True)]

    def shape_of_block(self, index: int) -> tuple[int, ...]:
        """Of a matrix's block (rows, columns), of a vector (its one block) its own."""
        block = self.blocks[index]
        shape = self.shapes[block.tensor]
        if len(shape) < 2:
            return shape
        return (block.rows.stop - block.rows.start, prod(shape) // self.rows[block.tensor])

    @property
    def block_sizes(self) -> list[int]:
        """Elements of each block; the last one of a tensor has the gap behind it."""
        sizes = [
            rows * (prod(self.shapes[block.tensor]) // self.rows[block.tensor])
            for block, rows in zip(self.blocks, self.rows_of_blocks, strict=True)
        ]
        for k, block in enumerate(self.blocks):
            if block.rows.stop == self.rows[block.tensor]:
                sizes[k] += self.sizes[block.tensor] - prod(self.shapes[block.tensor])
        return sizes


def rows_of(shape: Sequence[int]) -> int:
    """How many rows a tensor of that shape has."""
    return prod(shape[: depth_of(shape)])


def depth_of(shape: Sequence[int]) -> int:
    """How many of its first dimensions number the rows."""
    columns, depth = 1, len(shape)
    while depth and columns < ROW:
        depth -= 1
        columns *= shape[depth]
    return depth


def _rows_of_a_block(columns: int, block: int) -> int:
    unit = ALIGNMENT // gcd(columns, ALIGNMENT)  # so many rows are a multiple of the alignment
    return max(1, block // (columns * unit)) * unit
