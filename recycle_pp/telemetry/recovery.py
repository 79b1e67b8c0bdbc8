"""The phases of one recovery, on one clock: from the death to the last worker that had to wait for it.

died        the worker died (its supervisor's or its own word), or made its last progress; else when it was noticed
detected    the coordinator knew
elected     it coordinates in the place of one that died (only then)
announced   it announced the new generation
unblocked   the last survivor was out of whatever had blocked it
regrouped   the last survivor had its new links
planned     the plan of the remainder was made
resumed     the last survivor that had to wait started its next op

A further death before the end starts the later phases anew; the stall counts from the first.
"""

from __future__ import annotations

from recycle_schedules import Worker
from recycle_schedules.analysis.figures import PARTS

from recycle_pp.protocol.job import Job

from .events.recovery import Resumed

PROMPT = 0.002  # seconds; a first op planned later than this waits by plan, not for the recovery
Part = tuple[int, str, tuple[int, int], int]
"""Step, kind, micro-batch and stage of an op, a B as its I and its W: what counts as one lost op (docs/figures.md)."""


class Recovery:
    def __init__(self, step: int) -> None:
        self.step = step
        self.dead: dict[Worker, float] = {}
        self.detected = 0.0
        self.lost: set[Part] = set()
        self.redone = 0  # lost ops that the newest plans run again
        self.phases: dict[str, float] = {}
        self.left = (0.0, 0.0)  # seconds that the rest of the step takes by plan, and the least that any plan can take
        self._resumed: dict[Worker, dict[str, float]] = {}
        self._prompt: set[Worker] = set()

    @property
    def stall(self) -> float:
        """Seconds."""
        return self.phases["resumed"] - self.phases["died"]

    def death(self, worker: Worker, now: float) -> None:
        self.dead[worker] = now
        self.detected = self.detected or now
        self.phases.setdefault("died", now)
        self.phases.setdefault("detected", now)

    def coordinator_lost(self, lost_at: float, elected_at: float) -> None:
        self.phases |= {"died": lost_at, "detected": lost_at, "elected": elected_at}

    def died(self, worker: Worker, at: float) -> None:
        """The time of a death, from who stood nearer."""
        self.dead[worker] = at
        self.phases["died"] = min(self.phases["died"], at)

    def announced(self, now: float) -> None:
        self.phases["announced"] = now
        self._resumed.clear()

    def planned(self, now: float, job: Job, gone: set[Part]) -> None:
        """gone: what had ended on the dead. Lost of it is what must run again: not what is in a sum that survives."""
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
        first = {} if plan is None else {w: ops[0].start for w in job.live if (ops := plan.of(w))}
        busy = {} if plan is None else {Worker.parse(w): t for w, t in (plan.problem.busy_until or {}).items()}
        self._prompt = {w for w, start in first.items() if start <= busy.get(w, 0.0) + PROMPT}

    def resumed(self, worker: Worker, times: dict[str, float]) -> None:
        self._resumed[worker] = times

    def complete(self, job: Job) -> bool:
        if not job.live <= self._resumed.keys():
            return False
        heard = self._resumed
        self.phases["unblocked"] = max(t["unblocked"] for t in heard.values())
        self.phases["regrouped"] = max(t["grouped"] for t in heard.values())
        # Whoever was still busy with an op of its own when the plan came did not have to wait.
        self.phases["resumed"] = max(t["resumed" if w in self._prompt else "followed"] for w, t in heard.items())
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
