"""A median of any number of values in little memory.

spread = RunningMedian()
spread.add(0.31)
spread.median                     # None before the first value; exact up to 1024 values
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from statistics import median

MOST = 1024  # values that are kept


class RunningMedian:
    """Every value while there are few; then every second, every fourth, ...: those kept are spread evenly over all."""

    def __init__(self, values: Iterable[float] = ()) -> None:
        self._kept = array("d")
        self._every, self._seen = 1, 0
        for value in values:
            self.add(value)

    def add(self, value: float) -> None:
        if self._seen % self._every == 0:
            self._kept.append(value)
            if len(self._kept) == MOST:
                self._kept, self._every = self._kept[::2], 2 * self._every
        self._seen += 1

    @property
    def median(self) -> float | None:
        return median(self._kept) if self._kept else None
