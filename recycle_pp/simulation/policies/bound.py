"""What nobody can beat."""

from __future__ import annotations

from ..run import Run
from .base import Base


class Bound(Base):
    """Every machine that is there works all the time, at most D x P of them: no bubbles, no recovery, layers in any
    pieces. A step is `Job.work` seconds of workers' time, whatever the schedule."""

    def begin(self, run: Run) -> None:
        super().begin(run)
        self._set()

    def lost(self, machine: int) -> None:
        self._set()

    def gained(self, machine: int) -> None:
        self._set()

    def _set(self) -> None:
        machines = min(len(self.run.up), self.job.workers)
        self.run.go_on(self.job.work / machines if machines else None, machines)
