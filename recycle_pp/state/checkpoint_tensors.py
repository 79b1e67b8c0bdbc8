"""The tensors that a worker saves, built from its units.

    tensors = pieces(optimizer, stage, units)       # name in a checkpoint's part -> tensor, a live view
    names = tensors_of(stage)                       # the tensors that all savers of the stage save together

If a worker saves all units of a tensor from one piece of memory, the tensor has its plain name (`model.NAME`).
Otherwise each unit is one or more boxes, `model.NAME@OFFSETS/SHAPE` (see `state.checkpoint`). A tied tensor is saved by
the first stage that holds it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from math import prod

from torch import Tensor

from recycle_pp.model.stage import Stage
from recycle_pp.numerics.layout import depth_of
from recycle_pp.numerics.optimizer import StageOptimizer


def pieces(optimizer: StageOptimizer, stage: Stage, units: Collection[int]) -> dict[str, Tensor]:
    """Name -> live view of the state of these units. Includes the exponents if unit 0 is among the units."""
    found: dict[str, Tensor] = {}
    layout = stage.layout
    saved = [unit for unit in sorted(units) if not stage.borrows(layout.names[layout.units[unit].tensor])]
    for tensor, members in groupby(saved, key=lambda unit: layout.units[unit].tensor):
        name, shape, of = layout.names[tensor], layout.shapes[tensor], list(members)
        rows = sum(layout.units[unit].length for unit in of)
        if rows == layout.rows[tensor] and all(optimizer.held[unit] is optimizer.held[of[0]] for unit in of):
            held, span = optimizer.held[of[0]], layout.span(range(of[0], of[-1] + 1))
            start = span.start - layout.spans[held.units[0]].start
            for prefix, vector in zip(held.names, held.state, strict=True):
                found[f"{prefix}.{name}"] = vector[start : start + prod(shape)].view(shape)
            continue
        for unit in of:
            for prefix, flat in zip(optimizer.held[unit].names, optimizer.vectors(unit), strict=True):
                cut = boxes(shape, layout.units[unit].rows, layout.matrix(unit, flat), depth_of(shape))
                for offsets, piece in cut:
                    found[f"{prefix}.{name}@{_list(offsets)}/{_list(shape)}"] = piece
    if 0 in units:
        exponents = optimizer.exponents().items()
        found |= {key: tensor for key, tensor in exponents if not stage.borrows(key.partition(".")[2])}
    return found


def tensors_of(stage: Stage) -> list[str]:
    """Checkpoint names of all tensors of the stage, except those that an earlier stage saves."""
    exponents = ["exponent"] * stage.gradients.reproducible
    return [
        f"{prefix}.{name}"
        for tensor, name in enumerate(stage.names)
        if not stage.borrows(name)
        for prefix in [*stage.names_of(tensor), *exponents]
    ]


def boxes(shape: Sequence[int], rows: slice, matrix: Tensor, depth: int) -> Iterator[tuple[list[int], Tensor]]:
    """(offsets, piece) for each box, so that the boxes cover the rows `rows` of a tensor of this shape. Pieces are
    views of `matrix` with as many dimensions as the tensor.

    matrix  the elements of these rows, shape (rows, columns)
    depth   number of leading dimensions of the tensor that are flattened into rows
    """
    if depth == 0:
        yield [0] * len(shape), matrix.reshape(tuple(shape))
        return
    if depth == 1:
        yield [rows.start, *[0] * (len(shape) - 1)], matrix.reshape(-1, *shape[1:])
        return
    inner, row = prod(shape[1:depth]), rows.start
    while row < rows.stop:
        outer = row // inner
        stop = min(rows.stop, (outer + 1) * inner)
        part = matrix[row - rows.start : stop - rows.start]
        for offsets, piece in boxes(shape[1:], slice(row - outer * inner, stop - outer * inner), part, depth - 1):
            yield [outer, *offsets], piece.unsqueeze(0)
        row = stop


def _list(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))
