"""Detects slow workers, also on a busy machine.

    slowness = Slowness()
    slowness.place(worker, "host-a", cores=8)
    for speed in slowness.add({worker: (own, wall), ...}): ...     # after a step: workers that became slow or recovered
    slowness.factors                                               # {worker: factor}: the workers that are slow now

`own` and `wall` are the times of a worker's ops in a step, as multiples of the profiled times. `own` excludes the time
in which the thread waited for a core. A worker is slow in two cases:

- Its own time is at least `SLOW` (1.35) times the median of all others in 5 of its last `STEPS` (7) steps. A busy
  machine does not cause that: 12 workers on 2 cores at a load of 20 reach 1.26. The profile covers few steps, which may
  have been fast by chance. The first `STEPS` steps of a worker therefore correct its times, by `CHANCE` (1.25) at most.
- It waits for a core longer than the other workers of its machine, for instance because of another process on its core
  or a limit of its container. Its wall time is at least `WAITS` (1.6) times theirs in 7 of the last `STEADY` (8) steps.
  The factor is `CROWDED` (2.0) if the workers outnumber the cores: 12 workers on 2 cores reach 1.72.
  Workers of unknown machines cannot be slow in this way.

A worker has recovered when the median of its own times falls below `NORMAL` (1.2). If it waited for a core, the median
of its wall times must fall below `WAITS_NO_MORE` (1.4). That takes 4 or 5 steps.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

from recycle_schedules import Worker

SLOW, NORMAL, STEPS, CHANCE = 1.35, 1.2, 7, 1.25
WAITS, CROWDED, WAITS_NO_MORE, STEADY = 1.6, 2.0, 1.4, 8
AGAIN = 1.5  # the factor of a slow worker is updated if it changes by at least this ratio


class Speed(NamedTuple):
    worker: Worker
    factor: float  # duration of its ops as a multiple of its peers'; 1.0: it recovered


class Slowness:
    def __init__(self) -> None:
        self.factors: dict[Worker, float] = {}
        self._machines: dict[Worker, str] = {}
        self._cores: dict[str, int] = {}
        self._own: dict[Worker, deque[float]] = {}
        self._usual: dict[Worker, float] = {}  # median own time in the first steps
        self._wall: dict[Worker, deque[float]] = {}
        self._waits: set[Worker] = set()  # workers that are slow only because they wait for a core

    def place(self, worker: Worker, machine: str, cores: int) -> None:
        """Records the machine of a worker's new process and drops the times of the old process. The worker's factor
        stays until the new process has been measured."""
        if machine:
            self._machines[worker] = machine
            self._cores[machine] = cores
        for known in (self._own, self._usual, self._wall):
            known.pop(worker, None)

    def add(self, longer: Mapping[Worker, tuple[float, float]]) -> list[Speed]:
        """Takes (own, wall) of each worker in a step. Returns the workers that became slow or recovered.

        If the factor of a slow worker changes later, only `factors` shows it.
        """
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
        wall = self._wall[worker]
        known = self.factors.get(worker)
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
    """The value as a multiple of the median of others; 1.0 without others."""
    usual = median(others) if others else 0.0
    return value / usual if usual > 0 else 1.0
