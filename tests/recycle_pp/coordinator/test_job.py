"""A job made from settings follows these settings."""

from __future__ import annotations

from itertools import pairwise

import pytest
from recycle_schedules import Worker
from recycle_schedules.in_flight import peaks

from recycle_pp.coordinator.job import new_job
from recycle_pp.fitting.problem import with_less_memory
from recycle_pp.model.memory import PROCESS, stage_memory
from recycle_pp.protocol.events import LinksBroken, MessageReceived, PlanMade, ProblemChanged, WorkerDied, WorkerReady
from recycle_pp.protocol.job import Job
from recycle_pp.wire.messages.generations import Adopt, Holds, Report, SteadyPlan

from ..in_process import small

SHAPE = {
    "model__sequence": 256, "parallel__microbatch_size": 4, "parallel__pipelines": 3, "parallel__microbatches": 6,
    "schedule__memory_extra": 4, "schedule__profile_steps": 0, "model__recompute": "auto", "run__device": "cpu",
}  # fmt: skip


HOLDS = Holds([], None, -1)


def test_each_plan_names_the_stages_that_recompute():
    of = stage_memory(small(**SHAPE, parallel__memory="1GB"), 0)
    room = PROCESS + sum(of.always(3, 6).values()) + of.whole_op + 2.02 * of.flight
    job = new_job(small(**SHAPE, parallel__memory=f"{room}"), first_step=0)

    def recomputing(kind: type) -> dict[int, bool]:
        """`recompute` by stage in the messages of this kind: for the first generation and for its next plan."""
        reports = [MessageReceived(m, Report(job.generation, [], False, 0.0, HOLDS)) for m in sorted(job.live)]
        sends = [send for report in reports for send in job.handle(report).sends]
        sends += job.handle(PlanMade(job.problem_now())).sends
        found = [send for send in sends if isinstance(send.message, kind)]
        return {job.assignment[to].stage: message.recompute for to, message in found}

    for member in job.assignment:
        job.handle(WorkerReady(member))
    assert recomputing(Adopt) == {0: False, 1: False}
    job.handle(WorkerDied(2))
    assert recomputing(SteadyPlan) == {0: True, 1: False}
    job.handle(LinksBroken())
    assert recomputing(Adopt) == {0: True, 1: False}


def dies_without_memory(job: Job, worker: Worker) -> int:
    """The planned peak of a worker that then runs out of memory and returns with fewer micro-batches in flight."""
    member = next(member for member, of in job.workers.items() if of == worker)
    planned = peaks(job.steady.newest)[worker]
    job.handle(WorkerDied(member))
    runs(job)
    job.handle(ProblemChanged(with_less_memory(job.problem, worker, job.in_flight(worker))))
    job.live.add(member)
    job.handle(LinksBroken())
    runs(job)
    return planned


def runs(job: Job) -> None:
    """The workers report, and the next steps are planned."""
    for member in sorted(job.live):
        job.handle(MessageReceived(member, Report(job.generation, [], False, 0.0, HOLDS)))
    job.handle(PlanMade(job.problem_now()))


@pytest.mark.parametrize("stage", range(4))
def test_each_time_a_worker_runs_out_of_memory_its_planned_peak_falls(stage):
    shape = SHAPE | {"parallel__pipelines": 2, "parallel__stages": 4, "parallel__microbatches": 2, "model__layers": 4}
    job = new_job(small(**shape | {"model__recompute": "false"}), first_step=0)
    for member in job.assignment:
        job.handle(WorkerReady(member))
    runs(job)
    found = [dies_without_memory(job, Worker(1, stage)) for _ in range(4)]
    assert all(after < before or after == 1 for before, after in pairwise(found)), found


def test_after_a_death_the_planned_peak_falls_below_the_lower_limit_by_bytes():
    of = stage_memory(small(**SHAPE, parallel__memory="1GB"), 0)
    room = PROCESS + sum(of.always(3, 6).values()) + of.op + 3.02 * of.each()
    job = new_job(small(**SHAPE | {"model__recompute": "false"}, parallel__memory=f"{room}"), first_step=0)
    for member in job.assignment:
        job.handle(WorkerReady(member))
    runs(job)
    job.handle(WorkerDied(2))
    runs(job)
    worker = Worker(0, 0)
    assert job.problem_now().limit(worker) == 2 < job.problem.limit(worker)
    assert [dies_without_memory(job, worker) for _ in range(2)] == [2, 1]
