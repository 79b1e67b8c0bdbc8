"""The extra time of a step in which a worker dies, from a plan of the remainder by the recovery protocol.

    broken = BrokenSteps(times)
    broken.excess((6, 6, 6, 6), layout, stage=2)       # seconds, without the stall

A plan is cut at some moment and the dead worker's record is dropped. `protocol.ledger.remainder` computes the remaining
ops, and the planner plans them, as in a real recovery."""

from __future__ import annotations

from statistics import mean

from recycle_schedules import KINDS, Plan, Worker, plan
from recycle_schedules.layers import Layout
from recycle_schedules.op_kinds import O

from recycle_pp.protocol.ledger import Record, remainder

from .job import Shape
from .step_times import StepTimes

CUTS = (0.2, 0.5, 0.8)
"""Moments at which a step is cut, as shares of the step. Deaths are uniform in time."""
MOST = 24
"""Maximum number of memberships and stages that are cut. Others use the mean of those, as a share of their step."""
LARGEST = 20_000
"""Maximum number of ops of a step that is planned for each cut. Larger steps are cut once."""


class BrokenSteps:
    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._known: dict[tuple[Shape, Layout, int], float] = {}  # share of the step
        self._usual = 0.5  # before the first measurement

    def forget(self) -> None:
        """Drops the results that are based on estimated plans."""
        self._known.clear()
        self._usual = 0.5

    def excess(self, shape: Shape, layout: Layout, stage: int) -> float:
        """Seconds that a death at this stage adds to the planned step, averaged over the moment of death."""
        key = shape, layout, stage
        seconds = self._times.seconds(shape, layout)
        if key not in self._known:
            found = self._times.planned.get((shape, layout))
            if found is None or len(self._known) >= MOST:
                return seconds * self._usual
            self._known[key] = self._measured(found, stage) / seconds
            self._usual = mean(self._known.values())
        return seconds * self._known[key]

    def _measured(self, found: Plan, stage: int) -> float:
        victim = Worker(found.problem.live[stage][0], stage)
        cuts = CUTS if len(found) <= LARGEST else CUTS[1:2]
        return mean(max(0.0, cut_at(found, victim, share * found.makespan) - found.makespan) for share in cuts)


def cut_at(found: Plan, victim: Worker, moment: float) -> float:
    """Length of the step if `victim` dies at `moment` and all others continue at once. Times in the plan's unit."""
    problem, a = found.problem, found.arrays
    records = {worker: Record(0) for worker in problem.workers() if worker != victim}
    busy = dict.fromkeys(records, 0.0)
    keys = problem.microbatch_keys()
    begin = float(a.start.min())
    columns = (x.tolist() for x in (a.kind, a.microbatch, a.stage, a.pipeline, a.start, a.end))
    for kind, microbatch, stage, pipeline, start, end in sorted(zip(*columns, strict=True), key=lambda op: op[4]):
        worker = Worker(pipeline, stage)
        if start - begin >= moment or worker == victim:
            continue
        if kind == O:
            records[worker].reduced = True
        else:
            records[worker].done.setdefault(KINDS[kind], []).extend(keys[microbatch])
        busy[worker] = max(busy[worker], end - begin - moment)
    dead = problem.replace(failed=[*problem.dead, victim])
    return moment + plan(remainder(dead, records, busy).problem).makespan
