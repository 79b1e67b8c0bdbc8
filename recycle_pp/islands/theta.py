"""Computes theta of one unit after some rounds, from the objects in the store.

    after = advanced(before, path, closings, unit, lr=0.7, decay=0.9)
    after.theta, after.momentum, after.rounds           # rounds: the statistics of each round

`unit` reads the objects of one unit. It returns the same values on all islands, so theta is the same on all islands.
If an object of an island is damaged, the mean of the units in it is taken over the other islands. All islands find the
same damage, because objects of a closed round never change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from .codec import Damaged, Floats
from .outer import mean_of, stepped
from .rounds import Apply, Closings


class Outer(NamedTuple):
    """State of a unit that only the outer step changes. Both are float32 (n,)."""

    theta: Floats
    momentum: Floats


class Unit(Protocol):
    """Reads the objects of one unit. Both methods raise Damaged if the object is damaged."""

    def delta(self, number: int, island: str) -> Floats:
        """The delta of an island in a closed round."""
        ...

    def snapshot(self, rounds: int) -> Outer:
        """The state after this number of rounds."""
        ...


@dataclass
class RoundOfUnit:
    """Statistics of a round over one unit, see `RoundStatistics`."""

    number: int
    square: float = 0.0
    dots: dict[str, dict[str, float]] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class After:
    outer: Outer
    rounds: list[RoundOfUnit]


def advanced(
    before: Outer, path: Apply, closings: Closings, unit: Unit, lr: float, decay: float, measured: bool = True
) -> After:
    """The state of a unit after the rounds of `path`.

    before    the state of this island; ignored if the path begins with a snapshot
    path      only the rounds that synchronise this unit, see `Apply.of_layer`
    measured  whether to compute statistics

    Raises Damaged if the snapshot is damaged.
    """
    outer = before if path.snapshot is None else unit.snapshot(path.snapshot)
    rounds = []
    for number in path.rounds:
        found = RoundOfUnit(number)
        deltas: dict[str, Floats] = {}
        for name in sorted(closings[number]):
            try:
                deltas[name] = unit.delta(number, name)
            except Damaged as damaged:
                found.refused.append(str(damaged))
        mean = mean_of(deltas, {name: closings[number][name].samples for name in deltas})
        if mean is not None:
            outer = Outer(*stepped(outer.theta, outer.momentum, mean, lr, decay))
            if measured:
                found.square, found.dots = _dot(mean, mean), _dots(deltas)
        rounds.append(found)
    return After(outer, rounds)


def _dots(deltas: Mapping[str, Floats]) -> dict[str, dict[str, float]]:
    return {
        name: {other: _dot(delta, deltas[other]) for other in sorted(deltas) if other >= name}
        for name, delta in deltas.items()
    }


def _dot(one: Floats, other: Floats) -> float:
    """The dot product. Its last bits may differ between islands, because it is only recorded."""
    return float(np.dot(one, other))
