"""The phases of one recovery, on one clock: from the death to the next op of the last worker that waited.

died        the worker died or, if it hung, made its last progress; if unknown, the time of detection
detected    the coordinator detected the death
elected     this coordinator was elected; only if the previous one was lost
announced   the coordinator announced the new generation
unblocked   the last survivor had left its blocking call
regrouped   the last survivor had built its new links
planned     the plan for the rest of the step was made
resumed     the last survivor that had to wait started its next op

Another death before the end repeats the later phases. The stall counts from the first death.
"""

from __future__ import annotations

from recycle_schedules import Worker
from recycle_schedules.analysis.figures import PARTS

from recycle_pp.protocol.job import Job

from .events.recovery import Resumed

# Seconds. If a worker's first op is planned to start later than this after the worker becomes free, the wait for the op
# is not part of the stall.
PROMPT = 0.002
Part = tuple[int, str, tuple[int, int], int]
"""An op, as lost ops are counted (docs/figures.md): step, kind, micro-batch, stage. A `B` counts as its `I` and `W`."""


class Recovery:
    def __init__(self, step: int) -> None:
        self.step = step
        self.dead: dict[Worker, float] = {}
        self.detected = 0.0
        self.lost: set[Part] = set()
        self.redone = 0  # lost ops that the newest plans run again
        self.phases: dict[str, float] = {}
        self.left = (0.0, 0.0)  # seconds of the rest of the step: as planned, and a lower bound for every plan
        self._generation: int | None = None  # the generation that follows the newest death, once it is announced
        self._resumed: dict[Worker, dict[str, float]] = {}
        self._prompt: set[Worker] = set()

    @property
    def stall(self) -> float:
        """Seconds from the first death until the last worker that waited had resumed."""
        return self.phases["resumed"] - self.phases["died"]

    def death(self, worker: Worker, now: float) -> None:
        self._generation = None
        self._resumed.clear()
        self.dead[worker] = now
        self.detected = self.detected or now
        self.phases.setdefault("died", now)
        self.phases.setdefault("detected", now)

    def coordinator_lost(self, lost_at: float, elected_at: float) -> None:
        self.phases |= {"died": lost_at, "detected": lost_at, "elected": elected_at}

    def died(self, worker: Worker, at: float) -> None:
        """Corrects the time of a worker's death."""
        self.dead[worker] = at
        self.phases["died"] = min(self.phases["died"], at)

    def announced(self, generation: int, now: float) -> None:
        self.phases["announced"] = now
        self._generation = generation
        self._resumed.clear()

    def planned(self, now: float, job: Job, gone: set[Part]) -> None:
        """Records that the plan for the rest of the step was made.

        gone: ops that dead workers had completed. An op that the plan repeats was lost; the result of any other op is
              already in a sum of gradients."""
        self.phases["planned"] = now
        plans = job.remainder_plans
        again = {
            (step, part, op.microbatch, op.stage)
            for step, plan in plans.items()
            for op in plan.ops
            if op.microbatch is not None
            for part in PARTS[op.kind]
        }
        self.lost |= gone & again
        self.redone = len(self.lost & again)
        plan = next(iter(plans.values()), None)
        self.left = (plan.makespan, plan.lower_bound) if plan else (0.0, 0.0)
        first = {} if plan is None else {w: ops[0].start for w in job.workers.values() if (ops := plan.of(w))}
        busy = {} if plan is None else {Worker.parse(w): t for w, t in (plan.problem.busy_until or {}).items()}
        self._prompt = {w for w, start in first.items() if start <= busy.get(w, 0.0) + PROMPT}

    def resumed(self, worker: Worker, generation: int, times: dict[str, float]) -> None:
        """Records when a worker resumed. Ignored if that was in a generation from before the newest death."""
        if generation == self._generation:
            self._resumed[worker] = times

    def complete(self, job: Job) -> bool:
        if not all(job.assignment[member] in self._resumed for member in job.live):
            return False
        times = self._resumed
        self.phases["unblocked"] = max(t["unblocked"] for t in times.values())
        self.phases["regrouped"] = max(t["grouped"] for t in times.values())
        # If a worker's first op is planned for a later time, the worker counts as resumed when it has its new orders.
        self.phases["resumed"] = max(t["resumed" if w in self._prompt else "followed"] for w, t in times.items())
        return True

    def event(self) -> Resumed:
        """The record of a complete recovery."""
        died = self.phases["died"]
        return Resumed(
            stall_seconds=self.stall,
            died_at=died,
            dead=[str(w) for w in sorted(self.dead)],
            lost_ops=len(self.lost),
            redone_ops=self.redone,
            left_seconds=self.left[0],
            left_bound_seconds=self.left[1],
            phases={name: at - died for name, at in sorted(self.phases.items(), key=lambda item: item[1])},
        )
