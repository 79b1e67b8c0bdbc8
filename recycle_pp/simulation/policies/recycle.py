"""ReCycle as published: re-routing, with the 1F1B schedule until the first death."""

from __future__ import annotations

from collections import Counter

from ..run import Run
from .base import Base


class Recycle(Base):
    """Peers take over the micro-batches of dead workers. Backwards are decoupled and the optimizer is staggered (Gandhi
    et al., SOSP'24, doi 10.1145/3694715.3695960). Failures are normalised: workers move so that the dead workers stay
    spread evenly over the stages. Only the number of dead workers therefore matters. A step takes as long as our
    planner's plan, but at least as long as a fault-free step of 1F1B, which is the schedule until the first death.

    After a death, training stalls for the time that we measured, and the step in progress is lost. A worker that moves
    to another stage receives its state while all others wait. The paper reports 95.2 % of the fault-free throughput for
    its own job and trace, recovery included."""

    def begin(self, run: Run) -> None:
        super().begin(run)
        D, P = self.job.pipelines, self.job.stages
        self.stage: dict[int, int] = {}  # machine that takes part -> its stage
        self.attempts: Counter[int] = Counter()
        for k, machine in enumerate(sorted(run.up)[: D * P]):
            self.stage[machine] = k % P
        self.spare = set(run.up) - set(self.stage)  # machines without a place
        self._set()

    def lost(self, machine: int) -> None:
        self.attempts[machine] += 1
        self.spare.discard(machine)
        if machine in self.stage:
            del self.stage[machine]
            self.run.drop_step()
            self.run.stall(self.costs.recovery.stall(self.rng))
            self._normalise()
            self._set()
            if self.spare:
                self._start(self.spare.pop())

    def gained(self, machine: int) -> None:
        self._start(machine)

    def _start(self, machine: int) -> None:
        attempt = self.attempts[machine]
        seconds = self.costs.start + self.costs.transfer(self.job.state_bytes(self.job.layout))
        self.run.later(seconds, lambda: self._joined(machine, attempt))

    def _joined(self, machine: int, attempt: int) -> None:
        counts = self._counts()
        if self.attempts[machine] != attempt:
            return
        if sum(counts) == self.job.workers:
            self.spare.add(machine)
        else:
            self.stage[machine] = counts.index(min(counts))
            self._set()

    def _normalise(self) -> None:
        counts = self._counts()
        if max(counts) - min(counts) > 1:
            mover = min(m for m, s in self.stage.items() if s == counts.index(max(counts)))
            self.stage[mover] = counts.index(min(counts))
            self.run.stall(self.costs.transfer(self.job.state_bytes(self.job.layout)))

    def _counts(self) -> list[int]:
        of = Counter(self.stage.values())
        return [of[s] for s in range(self.job.stages)]

    def _set(self) -> None:
        counts = self._counts()
        if not min(counts):
            self.run.advance(None, 0)
            return
        key = tuple(sorted(counts, reverse=True)), self.job.layout
        times = self.world.times
        self.run.advance(max(times.reference, times.seconds(*key)), sum(counts), key)
