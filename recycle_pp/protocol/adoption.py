"""Computes a generation's orders from its members' reports: the plan of the rest of the step, and each worker's part.

    adoption = adopt(problem, live, reports, committed=6, steps=100, units=units, planner=planner, derive=actions)
    adoption.left                                        # the work left in step 7
    adoption.plans                                       # step -> plan of the work left in that step
    adoption.message(worker, generation, evaluate, stagger)      # orders for the member that plays this worker

Pure: no sockets, no clock, no torch. The reports contain everything that the coordinator must know about the
interrupted step, so a new coordinator needs no history.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from recycle_schedules import Actions, Plan, Problem, Worker

from recycle_pp.wire.messages.generations import Adopt, Report, Shares
from recycle_pp.wire.messages.islands import OuterState
from recycle_pp.wire.messages.members import Assignment, Member

from .ledger import Record, Remainder, remainder
from .steady_state_plan import Planner
from .units import Units

Derive = Callable[[Plan], Actions]


@dataclass(frozen=True)
class Adoption:
    """The orders of one generation, for all workers.

    left     the work left in the step in progress
    plans    step -> plan of the work left in that step; for the step in progress, and for the next one if it has begun
    actions  step -> actions of that plan; None if the step has nothing left to run
    copies   stage -> member that sends the summed gradients to its peers, for stages in which some peer lacks them
    revoked  stages that must sum their gradients again
    shares   stage -> holders of the stage's units (a unit is a block of one layer's state)
    ahead    whether a worker has applied a step that is not committed
    """

    left: Remainder
    plans: Mapping[int, Plan]
    actions: Mapping[int, Actions | None]
    copies: Mapping[int, Member]
    revoked: Collection[int]
    shares: Mapping[int, Shares]
    ahead: bool

    def message(
        self, worker: Worker, generation: int, evaluate: int | None, stagger: bool, outer: OuterState | None = None
    ) -> Adopt:
        return Adopt(
            generation=generation,
            steps={step: of.packed(worker) if of else b"" for step, of in self.actions.items()},
            copy=self.copies.get(worker.stage),  # the copy is a broadcast, so all workers of the stage take part
            revoked=sorted(self.revoked),
            evaluate=evaluate,
            stagger=stagger,
            shares=self.shares[worker.stage],
            recompute=self.left.problem.recomputes[worker.stage],
            outer=outer,
        )


def adopt(
    problem: Problem,
    live: Assignment,
    reports: Mapping[Member, Report],
    committed: int,
    steps: int,
    units: Units,
    planner: Planner,
    derive: Derive,
) -> Adoption:
    """Plans the work left after the newest committed step, from the reports of the live members.

    problem    the planning problem of the live workers
    live       live member -> the worker W(d,s) that it plays
    reports    live member -> its report
    committed  newest committed step
    steps      number of steps of the job
    units      the holders of all units; this call updates them
    planner    returns a plan for a problem
    derive     returns the actions of all workers for a plan

    May take long, because it runs the planner. Raises StageLost if a unit has no holder left.
    """
    records, ahead = _records(reports, committed + 1), _records(reports, committed + 2)
    void = units.void(live, records)
    left = remainder(problem, _played(live, records), {live[member]: of.busy for member, of in reports.items()})
    revoked = left.revoked | void  # if a stage is revoked, all work on the next step is rolled back
    open_steps = {}
    if committed + 1 < steps and (left.sources or any(r.done for r in records.values())):
        open_steps[committed + 1] = left
        if not revoked and any(r.done for r in ahead.values()):
            open_steps[committed + 2] = remainder(problem, _played(live, ahead), {})
    shares = units.share_out(live, reports, committed, took_back=bool(revoked))
    plans = {k: planner(of.problem) for k, of in open_steps.items() if len(of.sources) < problem.stages}
    lacking = {live[member].stage for member, record in records.items() if not record.reduced}
    sources = {member: live[member].stage for member in live if live[member] in left.sources.values()}
    return Adoption(
        left=left,
        plans=plans,
        actions={k: derive(plans[k]) if k in plans else None for k in open_steps},
        copies={stage: member for member, stage in sources.items() if stage in lacking},
        revoked=revoked,
        shares=shares,
        ahead=any(report.ahead for report in reports.values()),
    )


def _records(reports: Mapping[Member, Report], step: int) -> dict[Member, Record]:
    """member -> the record of `step` in its report, or an empty record if the report has none."""
    found = {member: Record(step) for member in sorted(reports)}
    for member, report in reports.items():
        for reported in report.records:
            if reported.step == step:
                found[member] = Record.of(reported)
    return found


def _played(live: Assignment, records: Mapping[Member, Record]) -> dict[Worker, Record]:
    """The records, keyed by worker instead of member."""
    return {live[member]: record for member, record in records.items()}
