"""A job made from settings follows these settings."""

from __future__ import annotations

from recycle_pp.coordinator.job import new_job
from recycle_pp.model.memory import PROCESS, stage_memory
from recycle_pp.protocol.events import LinksBroken, MessageReceived, PlanMade, WorkerDied, WorkerReady
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
