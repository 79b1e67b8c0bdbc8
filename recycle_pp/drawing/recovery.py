"""A death inside a step and what followed it, read from a Trace.

    recovery = Recovery.of(trace, origin)      # None if nobody died in this step
    recovery.stall, recovery.phases["announced"], recovery.sentences(...)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from recycle_schedules import Trace, Worker

PHASES = ("detected", "announced", "unblocked", "regrouped", "planned", "resumed")
SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6}
"""A second in a trace's time unit."""


@dataclass(frozen=True)
class Recovery:
    """Who died, when, and when each phase ended; on the chart's time axis, in its unit."""

    workers: tuple[Worker, ...]
    died: float
    phases: Mapping[str, float]

    @classmethod
    def of(cls, trace: Trace, origin: float) -> Recovery | None:
        """None where no phases were measured. They are kept in seconds from the death; the death is at the last end
        of the dead workers' ops, or where the trace says `died` (in its own unit, like the ops)."""
        if not trace.phases:
            return None
        a = trace.arrays
        cut = np.array([s == "cut" for s in trace.status], bool)
        ran = {w for w in trace.problem.dead if ((a.pipeline == w.pipeline) & (a.stage == w.stage)).any()}
        gone = ran or {Worker(int(d), int(s)) for d, s in zip(a.pipeline[cut], a.stage[cut], strict=True)}
        mine = np.isin(a.pipeline.astype(np.int64) * trace.problem.stages + a.stage,
                       [w.pipeline * trace.problem.stages + w.stage for w in gone])  # fmt: skip
        died = trace.phases.get("died", float(a.end[mine].max(initial=origin))) - origin
        second = SECOND.get(trace.time_unit, 1.0)
        phases = {k: died + t * second for k, t in trace.phases.items() if k != "died"}
        return cls(tuple(sorted(gone)), died, dict(sorted(phases.items(), key=lambda item: item[1])))

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
