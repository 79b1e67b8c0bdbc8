"""The plan of the steps that nothing has broken: when a new one is wanted, when it is sent.

    steady = Steady(planner, validation=2)
    steady.adopted(problem)                       # the workers wait for it now
    steps = steady.plan(problem)                  # may take its time, in a thread of its own; kept for later
    for problem in steady.ahead(): steady.plan(problem)     # the same for the deaths that may come next
    steady.made(steps, problem)                   # the problem may be another one by now
    if steady.ready: for worker, message in steady.send(live, generation): ...

Making it never delays what is left of a broken step, nor a step for which the workers have a plan: new durations are
followed from the first commit on after their plan is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from recycle_schedules import Plan, Problem, Worker
from recycle_schedules.planner.store import PlanStore, Prepared

from recycle_pp.wire.messages.workers import SteadyPlan

Planner = Callable[[Problem], Plan]
Steps = Prepared  # what is run in every step, and in a validation


class Steady:
    """validation: micro-batches of each pipeline in one pass of a validation."""

    def __init__(self, planner: Planner, validation: int) -> None:
        self._store = PlanStore(validation, planner=planner)
        self.wanted = False  # somebody should plan
        self.due = False  # the workers wait
        self._last: tuple[Problem, Steps] | None = None  # planned last, and for which problem
        self._newest: Steps | None = None
        self._sent: Steps | None = None

    def plan(self, problem: Problem) -> Steps:
        """At once if an equal problem was planned before; else it is made, and kept. One thread at a time."""
        last = self._last
        if last is None or last[0] is not problem:
            last = self._last = problem, self._store.plan(problem)
        return last[1]

    def ahead(self) -> Iterator[Problem]:
        """The problems that the next deaths would lead to and that are not planned yet."""
        return iter(()) if self._newest is None else self._store.ahead(self._newest.plan.problem)

    def made(self, steps: Steps, problem: Problem) -> None:
        if steps.plan.problem == problem:
            self._newest, self.wanted = steps, False

    def adopted(self, problem: Problem) -> None:
        """A generation begins, in which nobody has a plan."""
        self.due, self.wanted = True, self._newest is None or self._newest.plan.problem != problem

    @property
    def fresh(self) -> bool:
        """There is a better plan than the one that the workers have."""
        return not self.due and self._newest is not self._sent

    @property
    def ready(self) -> bool:
        return self.due and not self.wanted

    def send(self, live: Iterable[Worker], generation: int) -> Iterator[tuple[Worker, SteadyPlan]]:
        assert self._newest is not None
        self._sent, self.due = self._newest, False
        plan, steady, forward = self._newest
        again = plan.problem.recomputes
        for worker in live:
            yield worker, SteadyPlan(generation, steady.packed(worker), forward.packed(worker), again[worker.stage])
