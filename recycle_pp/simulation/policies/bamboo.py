"""Bamboo: redundant computation in every step."""

from __future__ import annotations

from recycle_schedules.op_kinds import SPLIT, OpKind

from ..run import Run
from .base import Base


class Bamboo(Base):
    """Every worker also computes the forward of the next stage, so that it can replace a dead worker of that stage
    (Thorpe et al., NSDI'23). A step therefore takes (2F + I + W) / (F + I + W) times as long. A lost machine costs no
    work, but forming the pipelines again from all machines that are up takes `reconfigure` seconds. Surplus machines
    stand by and replace lost ones.

    Simplifications: redundant forwards never fit into bubbles, and memory always suffices. On ReCycle's trace the
    larger model ran out of memory, and the small one reached 57.7 % of the fault-free throughput."""

    def begin(self, run: Run) -> None:
        super().begin(run)
        sums = self.job.problem.model.sums
        forward = float(sums[OpKind.FORWARD][-1])
        self.redundant = 1 + forward / sum(float(sums[kind][-1]) for kind in SPLIT)
        self.used: set[int] = set()
        self._start()

    def lost(self, machine: int) -> None:
        if machine in self.used:
            self.run.stall(self.costs.reconfigure)
            self._start()

    def gained(self, machine: int) -> None:
        if self._pipelines() * self.job.stages > len(self.used):
            self.run.stall(self.costs.reconfigure)
            self._start()

    def _pipelines(self) -> int:
        return min(self.job.pipelines, len(self.run.up) // self.job.stages)

    def _start(self) -> None:
        pipelines = self._pipelines()
        kept = sorted(self.used & self.run.up) + sorted(self.run.up - self.used)
        self.used = set(kept[: pipelines * self.job.stages])
        step = self.usual_step(pipelines) * self.redundant if pipelines else None
        self.run.advance(step, len(self.used))
