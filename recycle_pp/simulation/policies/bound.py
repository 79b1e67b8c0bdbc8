"""An upper bound for every policy."""

from __future__ import annotations

from ..run import Run
from .base import Base


class Bound(Base):
    """Every machine that is up works all the time, up to D x P machines: no bubbles, no recovery, arbitrary division of
    layers. A step then takes `Job.work` seconds divided by the number of machines. No schedule is faster."""

    def begin(self, run: Run) -> None:
        super().begin(run)
        self._set()

    def lost(self, machine: int) -> None:
        self._set()

    def gained(self, machine: int) -> None:
        self._set()

    def _set(self) -> None:
        machines = min(len(self.run.up), self.job.workers)
        self.run.advance(self.job.work / machines if machines else None, machines)
