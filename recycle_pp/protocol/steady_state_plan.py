"""Decides when to make, and when to send, a new plan for steps that no death interrupts.

    steady = Steady(planner, validation=2)
    steady.adopted(problem)                       # a new generation, whose workers wait for a plan
    steps = steady.plan(problem)                  # may take long; runs in a thread; the result is cached
    for problem in steady.ahead(): steady.plan(problem)     # plans for possible next deaths
    steady.restore(state)                         # takes the `state` of another Steady, and plans again
    steady.made(steps, problem)                   # problem: the job's current one; ignores `steps` for a different one
    if steady.ready: for member, message in steady.send(live, generation): ...

Planning delays neither the rest of an interrupted step nor a step for which the workers have a plan. A plan for new
durations takes effect at the first commit after it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from recycle_schedules import Plan, Problem
from recycle_schedules.planner.store import PlanStore, Prepared

from recycle_pp.wire.messages.generations import SteadyPlan
from recycle_pp.wire.messages.members import Assignment, Member

Planner = Callable[[Problem], Plan]
Steps = Prepared  # plans of a step and of a validation


class SteadyState(NamedTuple):
    """The state of a `Steady` without its plans.

    wanted, due  see `Steady`
    planned      problem of the newest plan; None before the first plan
    unsent       whether the workers lack the newest plan
    """

    wanted: bool
    due: bool
    planned: Problem | None
    unsent: bool


class Steady:
    """The plans of uninterrupted steps. validation: micro-batches of each pipeline in one pass of a validation."""

    def __init__(self, planner: Planner, validation: int) -> None:
        self._store = PlanStore(validation, planner=planner)
        self.wanted = False  # whether a new plan is needed
        self.due = False  # whether the workers wait for a plan
        self._last: tuple[Problem, Steps] | None = None  # the last problem and its plan
        self._newest: Steps | None = None
        self._sent: Steps | None = None

    @property
    def newest(self) -> Plan | None:
        """The newest plan of a step."""
        return None if self._newest is None else self._newest.plan

    @property
    def state(self) -> SteadyState:
        planned = None if self.newest is None else self.newest.problem
        return SteadyState(self.wanted, self.due, planned, self._newest is not self._sent)

    def restore(self, state: SteadyState) -> None:
        self.wanted, self.due = state.wanted, state.due
        self._newest = None if state.planned is None else self.plan(state.planned)
        self._sent = None if state.unsent else self._newest

    def plan(self, problem: Problem) -> Steps:
        """Plans a problem, or returns the cached plan of an equal one. Only one thread may call this at a time."""
        last = self._last
        if last is None or last[0] is not problem:
            last = self._last = problem, self._store.plan(problem)
        return last[1]

    def ahead(self) -> Iterator[Problem]:
        """For each possible next death, the problem after it. Leaves out problems that already have a plan."""
        return iter(()) if self._newest is None else self._store.ahead(self._newest.plan.problem)

    def made(self, steps: Steps, problem: Problem) -> None:
        """Makes `steps` the newest plan, unless it was made for a problem other than `problem`."""
        if steps.plan.problem == problem:
            self._newest, self.wanted = steps, False

    def adopted(self, problem: Problem) -> None:
        """Records the start of a generation, in which no worker has a plan yet."""
        self.due, self.wanted = True, self._newest is None or self._newest.plan.problem != problem

    @property
    def fresh(self) -> bool:
        """Whether the workers have a plan, but not the newest one."""
        return not self.due and self._newest is not self._sent

    @property
    def ready(self) -> bool:
        return self.due and not self.wanted

    def send(self, live: Assignment, generation: int) -> Iterator[tuple[Member, SteadyPlan]]:
        """Yields the newest plan as one message for each live member.

        live: live member -> the worker that it plays
        """
        assert self._newest is not None
        self._sent, self.due = self._newest, False
        plan, steady, forward = self._newest
        again = plan.problem.recomputes
        for member, worker in live.items():
            yield member, SteadyPlan(generation, steady.packed(worker), forward.packed(worker), again[worker.stage])
