"""Detects slow workers, even on a busy machine.

    slowness = Slowness()
    slowness.place(worker, "host-a", cores=8)
    for speed in slowness.add({worker: (own, wall), ...}): ...     # after a step: workers that became slow or recovered
    slowness.factors                                               # {worker: factor}: the workers that are slow now
    slowness.first_steps(), slowness.load(first_steps)             # for another coordinator

`own` and `wall` are the times of a worker's ops in a step, as multiples of the profiled times. `own` excludes the time
in which the thread waited for a core. A worker is slow in any of three cases:

- Slower than the others. Its own time is at least `SLOW` (1.35) times the median of all other workers in 5 of its last
  `STEPS` (7) steps. A busy machine does not cause that: 12 workers on 2 cores at a load of 20 reach 1.26. The few steps
  of the profile may have been fast by chance, so the first `STEPS` steps of a worker correct its times, by a factor of
  at most `CHANCE` (1.25).
- Waiting for a core. Its wall time is at least `WAITS` (1.6) times that of the other workers on its machine in 7 of the
  last `STEADY` (8) steps, for instance because of another process on its core or a limit of its container. If the
  workers outnumber the cores, the threshold is `CROWDED` (2.0), because 12 healthy workers on 2 cores reach 1.72.
  This case needs a known machine.
- Slower than before. Its own time is at least 1.35 times that of its own first 100 steps, in 15 of its last 20 steps
  (`drift.py`). This finds a host that slows down as a whole, which the other two comparisons may miss.

A worker has recovered when the median of its own times falls below `NORMAL` (1.2), in the comparison that found it. If
it waited for a core, the median of its wall times must fall below `WAITS_NO_MORE` (1.4). Recovery is seen after 4 or 5
steps, and after 10 or 11 in the comparison with its own first steps.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from statistics import median
from typing import Literal, NamedTuple

from recycle_schedules import Worker

from .drift import Drift, First

SLOW, NORMAL, STEPS, CHANCE = 1.35, 1.2, 7, 1.25
WAITS, CROWDED, WAITS_NO_MORE, STEADY = 1.6, 2.0, 1.4, 8
AGAIN = 1.5  # the factor of a slow worker is updated if it changes by at least this ratio


Against = Literal["peers", "itself"]


class Speed(NamedTuple):
    """
    factor   duration of the worker's ops as a multiple of the usual duration; 1.0: it recovered
    against  source of the usual duration: the other workers ("peers"), or this worker's first steps ("itself")
    """

    worker: Worker
    factor: float
    against: Against = "peers"


class FirstSteps(NamedTuple):
    """The first steps of a worker on a machine. Later steps are compared with them."""

    machine: str
    cores: int
    first: First


class Slowness:
    def __init__(self) -> None:
        self.factors: dict[Worker, float] = {}
        self._machines: dict[Worker, str] = {}
        self._cores: dict[str, int] = {}
        self._own: dict[Worker, deque[float]] = {}
        self._usual: dict[Worker, float] = {}  # median own time in the first steps
        self._wall: dict[Worker, deque[float]] = {}
        self._drifts: dict[Worker, Drift] = {}
        self._why: dict[Worker, Literal["peers", "core", "itself"]] = {}  # the case in which it was last found slow

    def place(self, worker: Worker, machine: str, cores: int) -> bool:
        """Records the machine of a worker's new process and drops the times of the old process.

        Returns whether the worker is still on the same machine. If so, it is still compared with the first steps of its
        first process there. The worker's factor stays until the new process has been measured.
        """
        stays = bool(machine) and self._machines.get(worker) == machine
        if machine:
            self._machines[worker] = machine
            self._cores[machine] = cores
        for known in (self._own, self._usual, self._wall):
            known.pop(worker, None)
        if not stays:
            self._drifts.pop(worker, None)
            self._why.pop(worker, None)
        return stays

    def add(self, longer: Mapping[Worker, tuple[float, float]]) -> list[Speed]:
        """Records a step. Returns the workers that became slow or recovered.

        longer: worker -> (own, wall), as multiples of the profiled times

        A change in the factor of a worker that stays slow is not returned. It appears only in `factors`.
        """
        for worker, (own, wall) in longer.items():
            others = [o for w, (o, _) in longer.items() if w != worker]
            self._own.setdefault(worker, deque(maxlen=STEPS)).append(_beside(own, others))
            self._drifts.setdefault(worker, Drift()).add(own, wall)
        for worker, (_, wall) in longer.items():
            here = self._machines.get(worker)
            others = [x for w, (_, x) in longer.items() if w != worker and self._machines.get(w, "") == here]
            self._wall.setdefault(worker, deque(maxlen=STEADY)).append(_beside(wall, others))
        crowd = Counter(self._machines.get(w) for w in longer)
        changed = [self._judge(worker, crowd) for worker in longer]
        return [speed for speed in changed if speed]

    @property
    def learned(self) -> int:
        """Number of workers whose first steps are complete."""
        return sum(drift.first is not None for drift in self._drifts.values())

    def first_steps(self) -> dict[Worker, FirstSteps]:
        """The complete first steps of workers on known machines."""
        known = {worker: drift.first for worker, drift in self._drifts.items() if worker in self._machines}
        return {
            worker: FirstSteps(self._machines[worker], self._cores[self._machines[worker]], first)
            for worker, first in known.items()
            if first is not None
        }

    def load(self, first_steps: Mapping[Worker, FirstSteps]) -> None:
        """Continues with the first steps from another coordinator's `first_steps`. `place` later drops those of workers
        that have moved to another machine."""
        for worker, (machine, cores, first) in first_steps.items():
            self._machines[worker], self._cores[machine] = machine, cores
            self._drifts[worker] = Drift(first)

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
                self._why[worker] = "peers"
            elif waits:
                self._why[worker] = "core"
            elif self._drifts[worker].slow:
                self._why[worker] = "itself"
            else:
                return None
            self.factors[worker] = self._factor(worker)
            return Speed(worker, self.factors[worker], self._against(worker))
        factor = self._factor(worker)
        if factor < (WAITS_NO_MORE if self._why.get(worker) == "core" else NORMAL):
            del self.factors[worker]
            self._drifts[worker].forget()  # the drift's window is longer than `_own`, so it still contains slow steps
            return Speed(worker, 1.0, self._against(worker))
        if not 1 / AGAIN < factor / known < AGAIN:
            self.factors[worker] = factor
        return None

    def _against(self, worker: Worker) -> Against:
        return "itself" if self._why.get(worker) == "itself" else "peers"

    def _factor(self, worker: Worker) -> float:
        match self._why.get(worker):
            case "itself":
                return self._drifts[worker].factor
            case "core":
                return median(self._wall[worker])
            case _:
                return median(self._lately(worker))

    def _lately(self, worker: Worker) -> list[float]:
        return [own / self._usual[worker] for own in self._own[worker]]


def _beside(value: float, others: list[float]) -> float:
    """The value as a multiple of the median of others; 1.0 without others."""
    usual = median(others) if others else 0.0
    return value / usual if usual > 0 else 1.0
