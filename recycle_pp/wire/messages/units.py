"""The identities of units. A unit is a piece of one layer's state.

    UnitId(3, 2)                                                    # unit 2 of layer 3
    packed([UnitId(3, 0), UnitId(3, 1), UnitId(5, 0)])              # [(3, 0, 2), (5, 0, 1)]
    unpacked([(3, 0, 2), (5, 0, 1)])                                # the same units again

The identity of a unit is the same in all pipelines and stages, and it does not depend on the layers of a stage. In a
model with L layers, layer -1 is the part before the first layer, and layer L is the part after the last one. A tensor
that several layers share is a layer of its own, with a number above L, and may be in several stages.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class UnitId(NamedTuple):
    layer: int
    number: int


Layout = dict[int, list[int]]
"""stage -> its layers, in order; the same in all pipelines. This is also the order of a stage's units."""

UnitRuns = list[tuple[int, int, int]]
"""Runs of neighbouring units, as (layer, number of the first unit, number of units)."""


def packed(units: Iterable[UnitId]) -> UnitRuns:
    """The units as runs, in their order."""
    runs: UnitRuns = []
    for layer, number in units:
        if runs and runs[-1][0] == layer and sum(runs[-1][1:]) == number:
            runs[-1] = layer, runs[-1][1], runs[-1][2] + 1
        else:
            runs.append((layer, number, 1))
    return runs


def unpacked(runs: UnitRuns) -> list[UnitId]:
    return [UnitId(layer, number) for layer, first, count in runs for number in range(first, first + count)]


def length(runs: UnitRuns) -> int:
    """Number of units in the runs."""
    return sum(count for *_, count in runs)
