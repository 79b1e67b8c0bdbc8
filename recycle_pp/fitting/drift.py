"""Detects a worker that has become slower than it was in its own first steps.

    drift = Drift()
    drift.add(own, wall)         # after a step: times of the worker's ops, in any unit that stays the same
    drift.slow                   # whether most of the last steps took longer than the first steps
    drift.factor                 # duration of the worker's ops in the last steps, as a multiple of the first steps
    drift.forget()               # drops the last steps; call it when the worker has recovered
    drift.first                  # medians of the first steps; None before they are complete
    Drift(first)                 # continues with these medians, on a new coordinator

A comparison with other workers may miss a host that slows down as a whole, because all its workers are equally slow.

`own` excludes the time in which the thread waited for a core. A busy machine lengthens it anyway, because the workers
lose their CPU caches. Therefore `add` ignores a step in which the worker waited much longer than in its first steps.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import NamedTuple

FIRST = 100  # number of first steps; later steps are compared with them
RECENT, MOST = 20, 15  # MOST of the last RECENT steps must be slow; overheating lasts that long, a checkpoint does not
SLOW = 1.35  # own time of a slow step, as a multiple of the first steps; the same as in the comparison with peers
CALM = 1.25  # ratio of wall time to own time, relative to the first steps; above it the machine has become busy


class First(NamedTuple):
    """Medians of the first steps. own: time of the worker's ops. waits: wall time divided by own time."""

    own: float
    waits: float


class Drift:
    def __init__(self, first: First | None = None) -> None:
        self.first = first
        self._counted: list[First] = []  # the first steps so far, until there are FIRST of them
        self._recent: deque[float] = deque(maxlen=RECENT)

    def add(self, own: float, wall: float) -> None:
        if own <= 0:
            return
        waits = wall / own
        if self.first is None:
            self._counted.append(First(own, waits))
            if len(self._counted) == FIRST:
                self.first = First(*map(median, zip(*self._counted, strict=True)))
        elif waits < CALM * self.first.waits:
            self._recent.append(own / self.first.own)

    def forget(self) -> None:
        self._recent.clear()

    @property
    def slow(self) -> bool:
        return sum(own >= SLOW for own in self._recent) >= MOST

    @property
    def factor(self) -> float:
        """Median own time of the last steps, as a multiple of the first `FIRST` steps; 1.0 until there are later
        steps."""
        return median(self._recent) if self._recent else 1.0
