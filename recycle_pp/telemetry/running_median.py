"""The median of any number of values, in constant memory.

cpu = RunningMedian()
cpu.add(0.31)
cpu.median                        # None before the first value; exact for fewer than 1024 values
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from statistics import median

CAPACITY = 1024  # values that are kept


class RunningMedian:
    """Keeps evenly spaced values of the whole sequence: first every value, then every second, every fourth, ..."""

    def __init__(self, values: Iterable[float] = ()) -> None:
        self._kept = array("d")
        self._every = 1
        self._seen = 0
        for value in values:
            self.add(value)

    def add(self, value: float) -> None:
        if self._seen % self._every == 0:
            self._kept.append(value)
            if len(self._kept) == CAPACITY:
                self._kept = self._kept[::2]
                self._every = 2 * self._every
        self._seen += 1

    @property
    def median(self) -> float | None:
        return median(self._kept) if self._kept else None
