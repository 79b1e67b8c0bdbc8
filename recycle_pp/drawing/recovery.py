"""A death within a step and the recovery, from a Trace.

recovery = Recovery.of(trace, origin)      # None if no worker died in this step
recovery.stall, recovery.phases["announced"]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from recycle_schedules import Trace, Worker


@dataclass(frozen=True)
class Recovery:
    """A recovery. Times are on the chart's time axis and in its unit.

    workers  the dead workers
    died     time of death
    phases   {phase: its end}, in order of time"""

    workers: tuple[Worker, ...]
    died: float
    phases: Mapping[str, float]

    @classmethod
    def of(cls, trace: Trace, origin: float) -> Recovery | None:
        """The recovery in a trace; None if no phases were measured.

        origin: time of the trace at which the chart's axis starts

        If the trace has no time of death, uses the end of the dead workers' last op. If the trace does not name the
        dead workers, uses the problem's dead workers that ran an op. If none of these has a cut op, adds all workers
        with a cut op. If this gives no workers, uses all of the problem's dead workers."""
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
        """Time from the death until every waiting worker continued."""
        return self.resumed - self.died

    def spans(self) -> list[tuple[str, float, float]]:
        """(phase, start, end) in order of time. Each phase starts at the end of the previous one."""
        ends = list(self.phases.items())
        begins = [self.died, *(t for _, t in ends[:-1])]
        return [(name, begin, end) for (name, end), begin in zip(ends, begins, strict=True)]
