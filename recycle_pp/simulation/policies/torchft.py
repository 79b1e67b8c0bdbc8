"""torchft: whole replica groups leave and return."""

from __future__ import annotations

from ..run import Run
from .base import Base


class Torchft(Base):
    """A pipeline that has lost a worker pauses until it is whole again. The other pipelines discard the step, stall for
    a quorum, and continue with a smaller global batch (pytorch.org, June 2025: 2000 synthetic failures, no
    checkpoints). A new machine joins the pipeline that lacks the fewest machines. Once whole, that pipeline starts,
    receives the state, and takes part. Training makes no progress while no pipeline is whole. A step with a smaller
    global batch counts as a fraction of a step."""

    def begin(self, run: Run) -> None:
        super().begin(run)
        D, P = self.job.pipelines, self.job.stages
        self.places: list[set[int]] = [set() for _ in range(D)]  # machines of each pipeline
        self.spare: set[int] = set()
        self.whole: set[int] = set()  # pipelines that take part
        self.tries = [0] * D
        for k, machine in enumerate(sorted(run.up)):
            (self.places[k // P] if k < D * P else self.spare).add(machine)
        self.whole = {d for d in range(D) if len(self.places[d]) == P}
        self._set()

    def lost(self, machine: int) -> None:
        self.spare.discard(machine)
        for d, here in enumerate(self.places):
            if machine in here:
                here.discard(machine)
                self.tries[d] += 1
                if d in self.whole:
                    self.whole.discard(d)
                    self.run.drop_step((len(self.whole) + 1) / self.job.pipelines)
                    self.run.stall(self.costs.quorum)
                self._set()
                if self.spare:
                    self._place(self.spare.pop())
                return

    def gained(self, machine: int) -> None:
        self._place(machine)

    def _place(self, machine: int) -> None:
        P = self.job.stages
        lacking = [d for d, here in enumerate(self.places) if len(here) < P]
        if not lacking:
            self.spare.add(machine)
            return
        d = max(lacking, key=lambda d: (len(self.places[d]), -d))
        self.places[d].add(machine)
        if len(self.places[d]) == P:
            seconds = self.costs.start + self.costs.transfer(self.job.state_bytes(self.job.layout))
            attempt = self.tries[d]
            self.run.later(seconds, lambda: self._joins(d, attempt))

    def _joins(self, d: int, attempt: int) -> None:
        if self.tries[d] == attempt:
            self.whole.add(d)
            self._set()

    def _set(self) -> None:
        share = len(self.whole) / self.job.pipelines
        step = self.world.times.reference if share else None
        self.run.advance(step, len(self.whole) * self.job.stages, batch=share)
