"""All tensors of a stage in one vector: parameters, gradients and optimizer state share the same places.

    layout = Layout({"norm.weight": (64,), "head.weight": (256, 64)})
    flat = layout.zeros(device)
    norm, head = layout.views(flat)
    for unit in layout.units_of(flat): ...          # what one norm and one exponent are computed over

Every tensor begins at a multiple of 256 bytes, also as bfloat16: the bits of a matrix product may depend on the
alignment of its operands (MKL on a CPU; cuBLAS looks at up to 256 bytes), and they must be the same in a stage of any
size. The gaps stay zero.

A tensor is seen as a matrix: a row is its fewest last dimensions that have `ROW` elements together, so a vector is one
row. A unit is whole rows of one tensor, about `UNIT` elements, at a multiple of 256 bytes. The units of a tensor follow
from its shape alone, not from its stage or from the live workers. State is held, copied and saved by units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from math import gcd, prod

import torch
from torch import Tensor

from recycle_pp.comm.tensor_bytes import ALIGNMENT as BYTES
from recycle_pp.comm.tensor_bytes import aligned_bytes

ALIGNMENT = BYTES // 2  # elements: 256 bytes of bfloat16, 512 of float32
UNIT = 1 << 20  # elements of a unit, at most, unless a row has more
ROW = 16  # elements of a row, at least, where the tensor has as many


@dataclass(frozen=True)
class Unit:
    """Rows `rows` of tensor number `tensor`."""

    tensor: int
    rows: slice

    @property
    def length(self) -> int:
        """Number of rows."""
        return self.rows.stop - self.rows.start


class Layout:
    """Attributes, in order:
    names, shapes, sizes (elements, with the gap behind them) and rows, of each tensor
    units, and spans: the elements of the vector that each unit takes, with the gap behind a tensor's last unit.
        Spans follow each other without a gap, and begin and end at multiples of `ALIGNMENT`.
    size: elements of the vector
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], unit: int = UNIT):
        """unit: elements of a unit, at most, unless a row has more."""
        self.names = list(shapes)
        self.shapes = [tuple(shape) for shape in shapes.values()]
        self.sizes = [-(-prod(shape) // ALIGNMENT) * ALIGNMENT for shape in self.shapes]
        self.size = sum(self.sizes)
        self.rows = [rows_of(shape) for shape in self.shapes]
        self._unit = unit
        self.units = [
            Unit(index, slice(first, min(first + step, rows)))
            for index, rows in enumerate(self.rows)
            for step in [_rows_of_a_unit(self._columns(index), unit)]
            for first in range(0, rows, step)
        ]
        starts = list(accumulate(self.sizes, initial=0))
        self.spans = [
            slice(
                starts[of.tensor] + of.rows.start * self._columns(of.tensor),
                starts[of.tensor + 1]
                if of.rows.stop == self.rows[of.tensor]
                else starts[of.tensor] + of.rows.stop * self._columns(of.tensor),
            )
            for of in self.units
        ]

    def part(self, units: range) -> Layout:
        """The layout of neighbouring units alone. It has the same units; a tensor that is cut is a matrix."""
        shapes: dict[str, Sequence[int]] = {}
        for index, found in groupby(self.units[units.start : units.stop], key=lambda unit: unit.tensor):
            of = list(found)
            rows = of[-1].rows.stop - of[0].rows.start
            whole = rows == self.rows[index]
            shapes[self.names[index]] = self.shapes[index] if whole else (rows, self._columns(index))
        return Layout(shapes, self._unit)

    def span(self, units: range) -> slice:
        """The elements that neighbouring units take."""
        return slice(self.spans[units[0]].start, self.spans[units[-1]].stop)

    def matrix(self, unit: int, flat: Tensor) -> Tensor:
        """The vector of one unit as (rows, columns), without the gap behind it."""
        rows, columns = self.units[unit].length, self._columns(self.units[unit].tensor)
        return flat[: rows * columns].view(rows, columns)

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

    def units_of(self, flat: Tensor) -> list[Tensor]:
        """The units that lie in `flat` (size,), in order, each (rows, columns)."""
        matrices = [view.view(rows, -1) for view, rows in zip(self.views(flat), self.rows, strict=True)]
        return [matrices[unit.tensor][unit.rows] for unit in self.units]

    @property
    def unit_names(self) -> list[str]:
        """`NAME[first row:last row]` of each unit, the same in every stage that holds the tensor."""
        return [f"{self.names[unit.tensor]}[{unit.rows.start}:{unit.rows.stop}]" for unit in self.units]

    @property
    def unit_sizes(self) -> list[int]:
        """Elements of each unit, with the gap behind it."""
        return [span.stop - span.start for span in self.spans]

    def _columns(self, tensor: int) -> int:
        return prod(self.shapes[tensor]) // self.rows[tensor] if self.rows[tensor] else 1


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


def _rows_of_a_unit(columns: int, unit: int) -> int:
    aligned = ALIGNMENT // gcd(columns, ALIGNMENT)  # so many rows are a multiple of the alignment
    return max(1, unit // (columns * aligned)) * aligned
