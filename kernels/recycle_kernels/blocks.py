"""Tile sizes of the kernels that process whole rows: pure functions of the shape, so all peers launch the same program.

    block, rows, warps = row_tile(width=4096)

Row kernels are memory-bound: any block with enough bytes in flight is equally fast. So the tile follows from the width
alone, without tuning or agreement between peers. The only matrix kernel, `weight_grad`, has a table of tiles.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_WIDTH = 16384  # a row must fit into the registers of one program


class RowTile(NamedTuple):
    """One program's tile of a [rows, width] tensor."""

    block: int  # columns, a power of two >= width
    rows: int  # rows, a power of two
    warps: int


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()


def row_tile(width: int) -> RowTile:
    """A tile of whole rows. It has 4096 elements, or one row if a row is longer, and 16 elements per thread.

    Raises ValueError if the width is above MAX_WIDTH."""
    if width > MAX_WIDTH:
        raise ValueError(f"a row of {width} elements does not fit into one program; the maximum width is {MAX_WIDTH}")
    block = power_of_two(width)
    return RowTile(block, rows=max(1, 4096 // block), warps=max(8, block // 512))
