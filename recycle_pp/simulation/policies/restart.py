"""Checkpoint and restart, with an elastic number of pipelines."""

from __future__ import annotations

import math

from ..run import Run
from .base import Base


class Restart(Base):
    """All workers stop when a participating machine is lost. They restart from the newest checkpoint with as many whole
    pipelines as the machines allow, and the same global batch. Returned machines take part from the next checkpoint on,
    if the gain before the next expected loss exceeds the cost of a restart.

    The interval between checkpoints is the optimal one, sqrt(2 C MTBF) for a cost C (Young 1974; Daly 2006, doi
    10.1016/j.future.2004.11.016), with the trace's own mean time between losses."""

    def begin(self, run: Run) -> None:
        super().begin(run)
        self.interval = math.sqrt(2 * self.costs.checkpoint * self.world.between_losses)
        self.used: set[int] = set()
        self.awaited = False  # whether returned machines wait for the next checkpoint
        self.since = 0.0  # start of the first interval
        self._start()

    def lost(self, machine: int) -> None:
        if machine in self.used:
            age = max(0.0, self.run.now - self.since) % (self.interval + self.costs.checkpoint)
            self.run.lose_steps(age * self.run.pace)
            self._restart()

    def gained(self, machine: int) -> None:
        free = min(len(self.run.up), self.job.workers) - len(self.used)
        if free < self.job.stages or self.awaited:
            return
        if not self.used:
            self._restart()
            return
        self.awaited = True
        age = max(0.0, self.run.now - self.since) % (self.interval + self.costs.checkpoint)
        self.run.later(self.interval - min(age, self.interval), self._grow)

    def _grow(self) -> None:
        """Restarts with more pipelines if that pays. Called at a checkpoint."""
        more = self._pipelines() - len(self.used) // self.job.stages
        if self.awaited and more > 0 and more / self._pipelines() * self.world.between_losses > self.costs.restart:
            self._restart()
        self.awaited = False

    def _restart(self) -> None:
        self.run.stall(self.costs.restart)
        self._start()

    def _pipelines(self) -> int:
        return min(self.job.pipelines, len(self.run.up) // self.job.stages)

    def _start(self) -> None:
        pipelines, self.awaited = self._pipelines(), False
        kept = sorted(self.used & self.run.up) + sorted(self.run.up - self.used)
        self.used = set(kept[: pipelines * self.job.stages])
        self.since = self.run.now + self.costs.restart
        share = self.costs.checkpoint / (self.interval + self.costs.checkpoint)
        self.run.advance(self.usual_step(pipelines) if pipelines else None, len(self.used), saving=share)
