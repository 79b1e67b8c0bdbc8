"""Finds the fastest tile of `weight_grad` for each shape, once, and lets the whole job use the same ones.

    found = tune(shape.products(), torch.bfloat16, device, cache=Path("runs/tiles.json"))   # one rank, on its GPU
    table = to_json(found)                                                              # plain data: broadcast this
    weight_grad(buffer, dy, x, tiles=from_json(table))                                  # every rank

Peers that use different tiles add in a different order and differ in the last bits, so the choice is one rank's and is
handed round like the rest of the configuration. Without a table every rank uses `default_tile`, equal by construction.
The cache keeps one table a GPU model, by its name, and Triton's version.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import torch
import triton
import triton.testing

from .weight_grad import Tile, Tiles, shape_key, weight_grad

CANDIDATES = [
    Tile(64, 64, 64),
    Tile(64, 128, 64, warps=4, stages=4),
    Tile(128, 128, 32, warps=8, stages=4),
    Tile(128, 128, 64, warps=8),
    Tile(128, 128, 64, warps=8, stages=4),
    Tile(128, 256, 32, warps=8, stages=4),
    Tile(128, 256, 64, warps=8),
    Tile(128, 256, 64, warps=8, stages=4),
    Tile(256, 128, 64, warps=8),
]


def tune(
    products: Iterable[tuple[int, int, int]], dtype: torch.dtype, device: torch.device | str, cache: Path | None = None
) -> dict[str, Tile]:
    """The fastest tile of every (O, K, T), by the key of its shape; known ones come from the cache. Needs a GPU."""
    model = f"{torch.cuda.get_device_name(device)}, triton {triton.__version__}"
    known = json.loads(cache.read_text()) if cache is not None and cache.exists() else {}
    tiles = from_json(known.get(model, {}))
    for o, k, t in products:
        dy, x = (torch.randn(t, n, device=device).to(dtype) for n in (o, k))
        if shape_key(dy, x) not in tiles:
            tiles[shape_key(dy, x)] = min(CANDIDATES, key=lambda tile: _milliseconds(tile, dy, x))
    if cache is not None:
        new = cache.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(known | {model: to_json(tiles)}, indent=1))
        new.replace(cache)
    return tiles


def to_json(tiles: Tiles) -> dict[str, dict[str, int]]:
    """Plain data, by shape key."""
    return {key: tile._asdict() for key, tile in tiles.items()}


def from_json(table: dict[str, dict[str, int]]) -> dict[str, Tile]:
    """The tiles of `to_json`."""
    return {key: Tile(**fields) for key, fields in table.items()}


def _milliseconds(tile: Tile, dy: torch.Tensor, x: torch.Tensor) -> float:
    """The median time of one launch; infinite when the tile does not fit this GPU."""
    buffer = torch.zeros(dy.shape[1], x.shape[1], device=x.device)
    tiles = {shape_key(dy, x): tile}
    try:
        return triton.testing.do_bench(lambda: weight_grad(buffer, dy, x, tiles), quantiles=[0.5])
    except triton.runtime.errors.OutOfResources:
        return float("inf")
