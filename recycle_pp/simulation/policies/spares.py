"""Hot spares: machines that stand by to replace lost machines."""

from __future__ import annotations

import math

from ..run import Run
from .base import Base, World


class Spares(Base):
    """A fixed number of whole pipelines train. All other machines stand by with the software loaded. A spare replaces a
    lost machine within about 20 s (TrainMover, arXiv 2412.12636), and the step is redone. If no spare is left, the job
    restarts with fewer pipelines, and grows again when enough machines are up.

    The best number of pipelines depends on the trace. The caller simulates several and reports the one that completes
    most steps. A real job could not know this number in advance."""

    def __init__(self, world: World, name: str, pipelines: int) -> None:
        super().__init__(world, name)
        self.wanted = pipelines

    def begin(self, run: Run) -> None:
        super().begin(run)
        self.used: set[int] = set()
        self._start()

    def lost(self, machine: int) -> None:
        if machine not in self.used:
            return
        self.used.discard(machine)
        self.run.drop_step()
        spare = min(self.run.up - self.used, default=None)
        if spare is not None:
            self.used.add(spare)
            self.run.stall(self.costs.swap)
        else:
            self.run.stall(self.costs.restart)
            self._start()

    def gained(self, machine: int) -> None:
        missing = self.wanted * self.job.stages - len(self.used)
        if missing > 0 and len(self.run.up) - len(self.used) >= self.job.stages:
            self.run.stall(self.costs.restart)
            self._start()

    def _start(self) -> None:
        pipelines = min(self.wanted, len(self.run.up) // self.job.stages)
        kept = sorted(self.used & self.run.up) + sorted(self.run.up - self.used)
        self.used = set(kept[: pipelines * self.job.stages])
        self.run.advance(self.usual_step(pipelines) if pipelines else None, len(self.used))


def worth_trying(pipelines: int, stages: int, counts: list[tuple[float, float, int]]) -> list[int]:
    """The numbers of pipelines to simulate, sorted. For several quantiles of the number of machines that are up over
    time, this is the number of whole pipelines that can be formed from that many machines.

    counts: (start, end, machines that are up) of each interval
    """
    live = sorted((n, end - begin) for begin, end, n in counts)
    whole = sum(seconds for _, seconds in live)
    found, passed = set(), 0.0
    for n, seconds in live:
        before, passed = passed / whole, (passed + seconds)
        for share in (0.01, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75):
            if before <= share < passed / whole:
                found.add(max(1, min(pipelines, math.floor(n / stages))))
    return sorted(found)
