"""The layout of a stage's tensors in one vector. Parameters, gradients and optimizer state share it.

    layout = Layout({"embedding.weight": (256, 64), "layers.0.weight": (64, 64)}, cut, layers=[-1, 0])
    memory = layout.zeros(device)                   # a `LayerMemory`: one tensor for each layer
    embedding, weight = layout.views(memory)
    for unit in layout.units_of(memory): ...        # a norm and an exponent are computed for each unit
    memory[layout.spans[3]]                         # the elements of a unit, or of neighbouring units of one layer

The stage's own memory is one tensor for each layer, so that a layer can move. Temporary results, such as a reduced
gradient, are one tensor. Both have the same layout.

Every tensor begins at a multiple of 256 bytes, even in bfloat16. The bits of a matrix product may depend on the
alignment of its operands (MKL on a CPU; cuBLAS checks up to 256 bytes), and they must not depend on the size of a
stage. The gaps between tensors stay zero.

A tensor is treated as a matrix. A row covers the last dimensions of the tensor, as few as have at least `ROW` elements
together, so a vector is one row. A unit consists of whole rows of one tensor, and begins at a multiple of 256 bytes.
The update rule of a tensor (`update_rules`) sets the maximum size of its units, or requires that a unit is a whole
tensor. The units of a tensor depend only on its name, shape and layer, not on its stage or on the live workers. State
is held, copied and saved in units.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from math import gcd, prod

import torch
from torch import Tensor

from recycle_pp.comm.tensor_bytes import ALIGNMENT as BYTES
from recycle_pp.comm.tensor_bytes import aligned_bytes
from recycle_pp.wire.messages.units import UnitId

ALIGNMENT = BYTES // 2  # elements; 256 bytes of bfloat16, 512 of float32
ROW = 16  # minimum number of elements of a row, unless the tensor has fewer
Cut = Callable[[str, Sequence[int], int], int | None]
"""(name, shape, layer) of a tensor -> maximum number of elements of its units; None: one unit."""


@dataclass(frozen=True)
class Unit:
    """The rows `rows` of tensor number `tensor`."""

    tensor: int
    rows: slice

    @property
    def length(self) -> int:
        """Number of rows."""
        return self.rows.stop - self.rows.start


class LayerMemory:
    """A vector of a stage, stored as one tensor for each layer.

    parts: the layers' tensors, in order; each begins at a multiple of 256 bytes
    """

    def __init__(self, parts: Sequence[Tensor]):
        self.parts = list(parts)
        self.dtype, self.device = self.parts[0].dtype, self.parts[0].device
        self._starts = list(accumulate(map(len, self.parts), initial=0))

    def __getitem__(self, place: slice) -> Tensor:
        """A view of the elements `place` of the vector. All of them must be in one layer."""
        layer = bisect_right(self._starts, place.start) - 1
        start = self._starts[layer]
        assert place.stop <= self._starts[layer + 1], "elements of several layers"
        return self.parts[layer][place.start - start : place.stop - start]

    def joined(self) -> Tensor:
        """A copy as one tensor."""
        return torch.cat(self.parts)


class Layout:
    """The layout of some tensors.

    names, shapes: name and shape of each tensor
    sizes: number of elements of each tensor, including the gap after it
    rows: number of rows of each tensor
    cut: see `__init__`
    layer_of: the layer of each tensor
    units: all units, in order
    spans: the elements of the vector that each unit occupies; the last unit of a tensor includes the gap after it.
        Spans are contiguous, and begin and end at multiples of `ALIGNMENT`.
    layers: layer -> its units, in order
    ids: the identity of each unit in messages
    size: elements of the vector
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], cut: Cut, layers: Sequence[int] = ()):
        """cut: see `Cut`; a unit has at least one row, even if the row has more elements
        layers: the layer number of each tensor, ascending; if empty, there is one layer"""
        self.cut = cut
        self.names = list(shapes)
        self.shapes = [tuple(shape) for shape in shapes.values()]
        self.sizes = [-(-prod(shape) // ALIGNMENT) * ALIGNMENT for shape in self.shapes]
        self.size = sum(self.sizes)
        self.rows = [rows_of(shape) for shape in self.shapes]
        self.layer_of = list(layers) or [0] * len(self.names)
        described = zip(self.names, self.shapes, self.layer_of, strict=True)
        self._most = {name: cut(name, shape, layer) for name, shape, layer in described}
        self.units = [
            Unit(index, slice(first, min(first + step, rows)))
            for index, (name, rows) in enumerate(zip(self.names, self.rows, strict=True))
            for step in [_rows_of_a_unit(rows, self._columns(index), self._most[name])]
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
        counts = Counter(self.layer_of[of.tensor] for of in self.units)
        ends = pairwise(accumulate(counts.values(), initial=0))
        self.layers = {layer: range(*of) for layer, of in zip(counts, ends, strict=True)}
        self.ids = [UnitId(layer, number) for layer, units in self.layers.items() for number in range(len(units))]

    def number(self, unit: UnitId) -> int:
        """The number that the unit with this identity has in this layout."""
        return self.layers[unit.layer][unit.number]

    def gathered(self, sources: Sequence[tuple[Layout, LayerMemory]]) -> LayerMemory:
        """Memory of this layout, with each layer's tensor from the first source that has the layer. Copies nothing."""
        found: dict[int, Tensor] = {}
        for layout, memory in reversed(sources):
            found |= zip(layout.layers, memory.parts, strict=True)
        return LayerMemory([found[layer] for layer in self.layers])

    def by_unit(self, flat: Tensor, units: Sequence[int] | None = None) -> dict[int, Tensor]:
        """Unit -> view of its elements in `flat`, which is the concatenation of all `units`.

        units: numbers, ascending; None: all
        """
        numbers = range(len(self.units)) if units is None else units
        sizes = [self.spans[unit].stop - self.spans[unit].start for unit in numbers]
        return dict(zip(numbers, flat.split(sizes), strict=True))

    def part(self, units: range) -> Layout:
        """A layout with only these neighbouring units, cut in the same way.

        If only some units of a tensor are among them, the tensor becomes a matrix of the rows of these units.
        """
        shapes: dict[str, Sequence[int]] = {}
        for index, found in groupby(self.units[units.start : units.stop], key=lambda unit: unit.tensor):
            of = list(found)
            rows = of[-1].rows.stop - of[0].rows.start
            whole = rows == self.rows[index]
            shapes[self.names[index]] = self.shapes[index] if whole else (rows, self._columns(index))
        return Layout(shapes, lambda name, *_: self._most[name])

    def span(self, units: range) -> slice:
        """The elements of neighbouring units."""
        return slice(self.spans[units[0]].start, self.spans[units[-1]].stop)

    def matrix(self, unit: int, flat: Tensor) -> Tensor:
        """The vector of one unit as (rows, columns), without the gap after it."""
        rows, columns = self.units[unit].length, self._columns(self.units[unit].tensor)
        return flat[: rows * columns].view(rows, columns)

    def zeros(self, device: torch.device, dtype: torch.dtype = torch.float32) -> LayerMemory:
        memory = self.memory(device, dtype)
        for part in memory.parts:
            part.zero_()
        return memory

    def memory(self, device: torch.device, dtype: torch.dtype) -> LayerMemory:
        """Uninitialised memory, with zeros in the gaps. On a CPU, pages are allocated when they are written."""
        sizes = [self.spans[units[-1]].stop - self.spans[units[0]].start for units in self.layers.values()]
        memory = LayerMemory([aligned_bytes(size * dtype.itemsize, device).view(dtype) for size in sizes])
        for piece, shape in zip(self._pieces(memory), self.shapes, strict=True):
            piece[prod(shape) :].zero_()
        return memory

    def vector(self, device: torch.device) -> Tensor:
        """float32 zeros (size,) in one tensor, aligned to 256 bytes."""
        return aligned_bytes(4 * self.size, device).view(torch.float32).zero_()

    def views(self, vector: LayerMemory | Tensor) -> list[Tensor]:
        """Views of the tensors in the vector, in order."""
        pieces = zip(self._pieces(vector), self.shapes, strict=True)
        return [piece[: prod(shape)].view(shape) for piece, shape in pieces]

    def units_of(self, vector: LayerMemory | Tensor) -> list[Tensor]:
        """Views of the units in the vector, in order, each (rows, columns)."""
        matrices = [view.view(rows, -1) for view, rows in zip(self.views(vector), self.rows, strict=True)]
        return [matrices[unit.tensor][unit.rows] for unit in self.units]

    @property
    def unit_names(self) -> list[str]:
        """The name of each unit, `NAME[START:STOP]` with its rows, the same in every stage that holds the tensor."""
        return [f"{self.names[unit.tensor]}[{unit.rows.start}:{unit.rows.stop}]" for unit in self.units]

    @property
    def described(self) -> dict[int, list[tuple[str, int]]]:
        """Layer -> (name, size) of each of its units."""
        pairs = list(zip(self.unit_names, self.unit_sizes, strict=True))
        return {layer: pairs[units.start : units.stop] for layer, units in self.layers.items()}

    @property
    def layer_rows(self) -> dict[int, int]:
        """Layer -> number of rows of its tensors."""
        return {layer: sum(self.units[unit].length for unit in units) for layer, units in self.layers.items()}

    @property
    def unit_sizes(self) -> list[int]:
        """Number of elements of each unit, including the gap after it."""
        return [span.stop - span.start for span in self.spans]

    def _pieces(self, vector: LayerMemory | Tensor) -> Iterator[Tensor]:
        """The elements of each tensor, including the gap after it."""
        starts = accumulate(self.sizes, initial=0)
        return (vector[start : start + size] for start, size in zip(starts, self.sizes, strict=False))

    def _columns(self, tensor: int) -> int:
        return prod(self.shapes[tensor]) // self.rows[tensor] if self.rows[tensor] else 1


def rows_of(shape: Sequence[int]) -> int:
    """Number of rows of a tensor of this shape."""
    return prod(shape[: depth_of(shape)])


def depth_of(shape: Sequence[int]) -> int:
    """Number of leading dimensions that are flattened into the rows of a tensor of this shape."""
    columns, depth = 1, len(shape)
    while depth and columns < ROW:
        depth -= 1
        columns *= shape[depth]
    return depth


def _rows_of_a_unit(rows: int, columns: int, most: int | None) -> int:
    if most is None:
        return rows
    aligned = ALIGNMENT // gcd(columns, ALIGNMENT)  # the fewest rows that keep the alignment
    return max(1, most // (columns * aligned)) * aligned
