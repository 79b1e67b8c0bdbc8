"""The layers of a model. A layout of the layers over the stages determines the durations of every stage.

    layers = Layers.of({"F": [1, 1, 2], "I": [1, 1, 2], "W": [1, 1, 2]}, stages=2)
    layers.durations((2, 1))                 # {"F": [2, 2], "I": [2, 2], "W": [2, 2]}
    layers.in_flight((2, 1), capacity=16e9)  # [inf, inf]: without sizes there is no limit

A layout is the number of layers of each stage, first stage first. All pipelines share one layout, so that any worker of
a stage can take over any micro-batch there. Embedding and head count as layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .op_kinds import SPLIT, OpKind

TIMES = (*SPLIT, OpKind.OPTIMIZER)
SIZES = ("bytes", "activation_bytes")
KEYS = (*TIMES, *SIZES)

Layout = tuple[int, ...]
"""Number of layers of each stage, (P,), each at least 1."""


@dataclass(frozen=True)
class Layers:
    """The layers of a model. values[key]: one number per layer, for every key in KEYS; 0 if the key was not given."""

    values: Mapping[str, tuple[float, ...]]

    @classmethod
    def of(cls, given: Any, stages: int) -> Layers:
        """Parse the problem's key `layers`. Raises ValueError if it is invalid; the message starts with the key.

        F, I, W            durations of the forward, the backward for the input, the backward for the weights
        O                  duration of the optimizer step
        bytes              permanent memory of the layer: parameters, gradients, optimizer state
        activation_bytes   memory of the layer per micro-batch in flight"""
        if not isinstance(given, Mapping) or not set(SPLIT) <= set(given):
            raise ValueError(
                f"layers: expected an object with the keys F, I and W, with one number per layer each, not {given!r}"
            )
        unknown = sorted(str(key) for key in given if key not in KEYS)
        if unknown:
            raise ValueError(f"layers: unknown key {unknown[0]!r}; known are {', '.join(KEYS)}")
        forward = given[OpKind.FORWARD]
        count = len(forward) if isinstance(forward, (list, tuple)) else 0
        for key, numbers in given.items():
            if not isinstance(numbers, (list, tuple)) or len(numbers) != count:
                raise ValueError(f"layers.{key}: expected a list of numbers, one per layer, as long as layers.F")
            for x in numbers:
                if isinstance(x, bool) or not isinstance(x, (int, float)) or not math.isfinite(x) or x < 0:
                    raise ValueError(f"layers.{key}: {x!r} is not a finite number of at least 0")
        if count < stages:
            raise ValueError(f"layers: {count} layers are too few for {stages} stages")
        return cls({key: tuple(map(float, given.get(key, (0,) * count))) for key in KEYS})

    @property
    def count(self) -> int:
        return len(self.values[OpKind.FORWARD])

    @cached_property
    def sums(self) -> dict[str, np.ndarray]:
        """Prefix sums by key, (L + 1,) float64: [k] is the sum over the first k layers."""
        return {key: np.concatenate([[0.0], np.cumsum(numbers)]) for key, numbers in self.values.items()}

    def check(self, layout: Sequence[int], stages: int) -> Layout:
        """The layout as a tuple. Raises ValueError if it is invalid."""
        fine = len(layout) == stages and all(isinstance(n, int) and n >= 1 for n in layout)
        if not fine or sum(layout) != self.count:
            raise ValueError(
                f"layout: expected {stages} numbers of at least 1 that add up to {self.count}, not {list(layout)}"
            )
        return tuple(layout)

    def durations(self, layout: Layout) -> dict[str, list[float]]:
        """The value of the problem's key `durations`: F, I and W of every stage, and O if any layer has a time for O. B
        is left out, because its default is I + W."""
        given = TIMES if any(self.values[OpKind.OPTIMIZER]) else SPLIT
        return {key: self._of_stages(key, layout) for key in given}

    def in_flight(self, layout: Layout, capacity: float) -> list[float]:
        """(P,): the maximum number of micro-batches in flight that fit on a worker of each stage, inf for no limit.

        capacity: bytes available on a worker."""
        held, each = (self._of_stages(key, layout) for key in SIZES)
        return [fitting(capacity - state, one) for state, one in zip(held, each, strict=True)]

    def _of_stages(self, key: str, layout: Layout) -> list[float]:
        """(P,): the sum of `values[key]` over the layers of each stage. Uses math.fsum, because differences of prefix
        sums can round differently for equal stages."""
        ends = np.cumsum(layout).tolist()
        return [math.fsum(self.values[key][end - n : end]) for end, n in zip(ends, layout, strict=True)]


def fitting(room: float, each: float) -> float:
    """The number of items of size `each` that fit into `room`. inf if `each` is 0, and 0 if `room` is negative."""
    if room < 0:
        return 0
    return math.floor(room / each * (1 + 1e-12)) if each else math.inf


__all__ = ["Layers", "Layout"]
