"""How a row is cut into blocks: pure functions of the shape, so that every peer launches the same program.

    block, rows, warps = row_tile(width=4096)

Kernels over rows are bound by memory: any block that keeps enough bytes in flight is as good as another, so theirs
follow from the width alone and there is nothing to tune or to agree on. The one matrix kernel, `weight_grad`, has
a table of tiles.
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
    """A tile of whole rows, 4096 elements or one row, 16 elements a thread.

    Raises ValueError when a row is wider than MAX_WIDTH.
    """
    if width > MAX_WIDTH:
        raise ValueError(f"a row of {width} elements does not fit one program; the width may be at most {MAX_WIDTH}")
    block = power_of_two(width)
    return RowTile(block, rows=max(1, 4096 // block), warps=max(8, block // 512))
