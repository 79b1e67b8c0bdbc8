"""Creates the `Job` of the protocol from the settings.

job = new_job(settings, first_step=20)
"""

from __future__ import annotations

from collections.abc import Mapping

from recycle_schedules import Worker, actions, plan

from recycle_pp.config.settings import Settings
from recycle_pp.fitting.problem import initial_problem
from recycle_pp.fitting.understudy_policy import bytes_per_element
from recycle_pp.protocol.job import Job
from recycle_pp.protocol.validation import per_pass


def new_job(
    settings: Settings,
    first_step: int,
    generation: int = -1,
    committed: int = -1,
    assignment: Mapping[int, Worker] | None = None,
) -> Job:
    """A job before its first generation.

    committed: newest committed step; by default the one before `first_step`
    assignment: member -> worker; None at the start
    """
    s = settings
    return Job(
        initial_problem(s),
        steps=s.run.steps,
        planner=plan,
        derive=actions,
        clip=s.optimizer.clip,
        stagger=s.optimizer.stagger,
        copies=s.parallel.copies,
        understudy=bytes_per_element(s),
        third=s.control.mismatch == "third",
        first_step=first_step,
        evaluate_every=s.run.validate_every,
        evaluate_microbatches=per_pass(s.validation_microbatches, s.parallel.pipelines, s.parallel.microbatches),
        save_every=s.checkpoint.every,
        generation=generation,
        committed=committed,
        assignment=dict(assignment or {}),
        islands=None if s.islands.store is None else (s.islands.every, s.islands.delay, s.islands.most_local),
    )
