"""Turns the reports of all members of a generation into orders: the rest of the broken step, and each worker's actions.

    adoption = adopt(problem, reports, committed=6, steps=100, units=units, planner=planner, derive=actions)
    adoption.left                                        # of step 7: lost ops, stages with a finished sum
    adoption.plans                                       # step -> plan of its remainder
    adoption.message(worker, generation, evaluate, stagger)      # for each member

Pure: no sockets, no clock, no torch. A new coordinator gets the same result, because it depends on reports alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from recycle_schedules import Actions, Plan, Problem, Worker

from recycle_pp.wire.messages.generations import Adopt, Report, Shares

from .ledger import Record, Remainder, remainder
from .steady_state_plan import Planner
from .units import Units

Derive = Callable[[Plan], Actions]


@dataclass(frozen=True)
class Adoption:
    """Fields:

    left     remainder of the step in progress
    plans    step -> plan of its remainder
    actions  step -> actions of its remainder, for this step and the next; None if nothing is left to run
    copies   stage -> source of its summed gradients, if one of its workers lacks them
    revoked  stages that must sum again
    shares   stage -> holders of its units
    ahead    a worker has applied a step that is not committed
    """

    left: Remainder
    plans: Mapping[int, Plan]
    actions: Mapping[int, Actions | None]
    copies: Mapping[int, Worker]
    revoked: Collection[int]
    shares: Mapping[int, Shares]
    ahead: bool

    def message(self, worker: Worker, generation: int, evaluate: int | None, stagger: bool) -> Adopt:
        return Adopt(
            generation=generation,
            steps={step: of.packed(worker) if of else b"" for step, of in self.actions.items()},
            copy=self.copies.get(worker.stage),  # a broadcast, so the whole stage takes part
            revoked=sorted(self.revoked),
            evaluate=evaluate,
            stagger=stagger,
            shares=self.shares[worker.stage],
            recompute=self.left.problem.recomputes[worker.stage],
        )


def adopt(
    problem: Problem,
    reports: Mapping[Worker, Report],
    committed: int,
    steps: int,
    units: Units,
    planner: Planner,
    derive: Derive,
) -> Adoption:
    """Plans what is left after the newest committed step, given what the live workers have done since.

    Planning may take long. Raises StageLost.
    """
    records, ahead = _records(reports, committed + 1), _records(reports, committed + 2)
    void = units.void(reports, records)
    left = remainder(problem, records, {worker: report.busy for worker, report in reports.items()})
    revoked = left.revoked | void  # if a stage is revoked, all work ahead of the commit is undone
    open_steps = {}
    if committed + 1 < steps and (left.sources or any(r.done for r in records.values())):
        open_steps[committed + 1] = left
        if not revoked and any(r.done for r in ahead.values()):
            open_steps[committed + 2] = remainder(problem, ahead, {})
    shares = units.share_out(reports, committed, took_back=bool(revoked))
    plans = {k: planner(of.problem) for k, of in open_steps.items() if len(of.sources) < problem.stages}
    lacking = {w.stage for w, record in records.items() if not record.reduced}
    return Adoption(
        left=left,
        plans=plans,
        actions={k: derive(plans[k]) if k in plans else None for k in open_steps},
        copies={stage: source for stage, source in left.sources.items() if stage in lacking},
        revoked=revoked,
        shares=shares,
        ahead=any(report.ahead for report in reports.values()),
    )


def _records(reports: Mapping[Worker, Report], step: int) -> dict[Worker, Record]:
    found = {worker: Record(step) for worker in sorted(reports)}
    for worker, report in reports.items():
        for reported in report.records:
            if reported.step == step:
                found[worker] = Record.of(reported)
    return found
