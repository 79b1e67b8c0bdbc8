"""The extra time of a step in which a worker dies, from a plan of the ops that still have to run after the death.

    broken = BrokenSteps(times)
    broken.excess((6, 6, 6, 6), layout, stage=2)       # seconds, without the stall

The plan of the step is cut at the moment of the death, and the dead worker's record of completed ops is dropped. Then
`protocol.ledger.remainder` computes the remaining ops and the planner plans them, as in a real recovery."""

from __future__ import annotations

from statistics import mean

from recycle_schedules import KINDS, Plan, Worker, plan
from recycle_schedules.layers import Layout
from recycle_schedules.op_kinds import O

from recycle_pp.protocol.ledger import Record, remainder

from .job import Shape
from .step_times import StepTimes

CUTS = (0.2, 0.5, 0.8)
"""Moments at which a step is cut, as shares of its length. Deaths are assumed to be uniform in time."""
MOST = 24
"""Maximum number of combinations of membership, layout and stage that are cut. All others use the mean result of
these."""
LARGEST = 20_000
"""Maximum number of ops of a step that is cut at all moments of CUTS. A larger step is cut only once, in the middle."""


class BrokenSteps:
    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._known: dict[tuple[Shape, Layout, int], float] = {}  # extra time as a share of the step
        self._usual = 0.5  # mean of these shares; 0.5 if there is none yet

    def forget(self) -> None:
        """Drops all results. Call it after `StepTimes.plan`, because the results were computed without the new
        plans."""
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
    """Length of the planned step if `victim` dies at `moment` and all other workers continue at once. Times are in the
    plan's unit."""
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
