"""Tells slow workers from a busy machine.

    slowness = Slowness()
    slowness.place(worker, "host-a", cores=8)
    for speed in slowness.add({worker: (own, wall), ...}): ...     # of a step: who has become slow, or is so no more
    slowness.factors                                               # of those who are slow now

`own` and `wall` are the times of a worker's ops in a step as multiples of what such ops took before, the first without
what the thread waited for a core. Slow is, for a reason that lasts:

- whose own time is at least `SLOW` (1.35) times the median of all others, in 5 of its last `STEPS` (7) steps. A busy
  machine does not lengthen it: 12 workers on 2 cores at a load of 20 reach 1.26. What it was compared with comes from
  few steps, though, and these may have been quick by chance: a worker's first `STEPS` steps correct it, by `CHANCE`
  (1.25) at most.
- who waits for a core as no other worker of its machine does (a neighbour on its core, a limit on its container): wall
  time in 7 of the last `STEADY` (8) steps at least `WAITS` (1.6) times that of the others there; `CROWDED` (2.0) where
  they have fewer cores than they are (12 on 2 reach 1.72). Workers of unknown machines are not judged by this.

It ends when the median of what made it slow is below `NORMAL` (1.2; waiting: 1.4): after 4 or 5 good steps.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

from recycle_schedules import Worker

SLOW, NORMAL, STEPS, CHANCE = 1.35, 1.2, 7, 1.25
WAITS, CROWDED, WAITS_NO_MORE, STEADY = 1.6, 2.0, 1.4, 8
AGAIN = 1.5  # a factor that changes less than this changes no plan


class Speed(NamedTuple):
    worker: Worker
    factor: float  # how many times longer its ops take than those of its peers; 1.0 when it is slow no more


class Slowness:
    def __init__(self) -> None:
        self.factors: dict[Worker, float] = {}
        self._machines: dict[Worker, str] = {}
        self._cores: dict[str, int] = {}
        self._own: dict[Worker, deque[float]] = {}
        self._usual: dict[Worker, float] = {}  # of its first steps
        self._wall: dict[Worker, deque[float]] = {}
        self._waits: set[Worker] = set()  # who are slow for that reason alone

    def place(self, worker: Worker, machine: str, cores: int) -> None:
        """A process takes this place: what was known of the one before is void, but for its share until it has shown
        its own speed."""
        if machine:
            self._machines[worker], self._cores[machine] = machine, cores
        for known in (self._own, self._usual, self._wall):
            known.pop(worker, None)

    def add(self, longer: Mapping[Worker, tuple[float, float]]) -> list[Speed]:
        """Returns onsets and ends alone. A factor that changes by `AGAIN` in between changes in `factors`."""
        for worker, (own, _) in longer.items():
            others = [o for w, (o, _) in longer.items() if w != worker]
            self._own.setdefault(worker, deque(maxlen=STEPS)).append(_beside(own, others))
        for worker, (_, wall) in longer.items():
            here = self._machines.get(worker)
            others = [x for w, (_, x) in longer.items() if w != worker and self._machines.get(w, "") == here]
            self._wall.setdefault(worker, deque(maxlen=STEADY)).append(_beside(wall, others))
        crowd = Counter(self._machines.get(w) for w in longer)
        changed = [self._judge(worker, crowd) for worker in longer]
        return [speed for speed in changed if speed]

    def _judge(self, worker: Worker, crowd: Mapping[str | None, int]) -> Speed | None:
        wall, known = self._wall[worker], self.factors.get(worker)
        if len(self._own[worker]) < STEPS:
            return None
        self._usual.setdefault(worker, max(1 / CHANCE, min(median(self._own[worker]), CHANCE)))
        own = self._lately(worker)
        machine = self._machines.get(worker)
        alone = WAITS if machine is None or crowd[machine] <= self._cores[machine] else CROWDED
        waits = len(wall) == STEADY and sorted(wall)[1] >= alone
        if known is None:
            if sorted(own)[2] >= SLOW:
                self._waits.discard(worker)
            elif waits:
                self._waits.add(worker)
            else:
                return None
            self.factors[worker] = self._factor(worker)
            return Speed(worker, self.factors[worker])
        factor = self._factor(worker)
        if factor < (WAITS_NO_MORE if worker in self._waits else NORMAL):
            del self.factors[worker]
            return Speed(worker, 1.0)
        if not 1 / AGAIN < factor / known < AGAIN:
            self.factors[worker] = factor
        return None

    def _factor(self, worker: Worker) -> float:
        return median(self._wall[worker] if worker in self._waits else self._lately(worker))

    def _lately(self, worker: Worker) -> list[float]:
        return [own / self._usual[worker] for own in self._own[worker]]


def _beside(value: float, others: list[float]) -> float:
    """1.0 without others: nobody to compare with."""
    usual = median(others) if others else 0.0
    return value / usual if usual > 0 else 1.0
