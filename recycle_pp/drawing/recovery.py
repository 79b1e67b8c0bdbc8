"""A death inside a step and what followed it, read from a Trace.

recovery = Recovery.of(trace, origin)      # None if nobody died in this step
recovery.stall, recovery.phases["announced"]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from recycle_schedules import Trace, Worker


@dataclass(frozen=True)
class Recovery:
    """Who died, when, and when each phase ended; on the chart's time axis, in its unit."""

    workers: tuple[Worker, ...]
    died: float
    phases: Mapping[str, float]

    @classmethod
    def of(cls, trace: Trace, origin: float) -> Recovery | None:
        """None where no phases were measured. A trace that does not say when its worker `died` has that at the last end
        of the dead workers' ops; one that does not say who, has those of the dead that ran something in it."""
        if not trace.phases:
            return None
        a, P = trace.arrays, trace.problem.stages
        worker = a.pipeline.astype(np.int64) * P + a.stage
        cut = set(worker[np.array([s == "cut" for s in trace.status], bool)].tolist())
        dead = {w.pipeline * P + w.stage for w in trace.problem.dead}
        ran = (cut & dead or cut) | (dead & set(worker.tolist())) or dead
        gone = sorted({w.pipeline * P + w.stage for w in trace.died} or ran)
        died = trace.phases.get("died", float(a.end[np.isin(worker, gone)].max(initial=origin))) - origin
        phases = {name: t - origin for name, t in trace.phases.items() if name != "died"}
        workers = tuple(Worker(*divmod(row, P)) for row in gone)
        return cls(workers, died, dict(sorted(phases.items(), key=lambda item: item[1])))

    @property
    def resumed(self) -> float:
        return self.phases.get("resumed", max(self.phases.values(), default=self.died))

    @property
    def stall(self) -> float:
        """From the death until every worker that had to wait went on."""
        return self.resumed - self.died

    def spans(self) -> list[tuple[str, float, float]]:
        """(phase, begin, end) in order of time; each phase begins where the one before ended."""
        ends = list(self.phases.items())
        begins = [self.died, *(t for _, t in ends[:-1])]
        return [(name, begin, end) for (name, end), begin in zip(ends, begins, strict=True)]
