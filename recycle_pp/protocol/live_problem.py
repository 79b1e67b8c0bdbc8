"""The job's problem without dead workers. The last result is cached, because its graph of links is large.

problem = LiveProblem()
problem.of(whole, live)       # a Problem with the dead workers in `failed`
"""

from __future__ import annotations

from collections.abc import Collection

from recycle_schedules import Problem, Worker


class LiveProblem:
    def __init__(self) -> None:
        self._made: tuple[Problem, frozenset[Worker], Problem] | None = None  # (whole problem, live workers, result)

    def of(self, whole: Problem, live: Collection[Worker]) -> Problem:
        """The problem `whole` (without deaths) with all workers that are not in `live` marked as failed. If any worker
        has failed, backwards may be split, so that peers can fill every bubble with the work of the dead workers."""
        live = frozenset(live)
        if self._made is None or self._made[0] is not whole or self._made[1] != live:
            dead = sorted(all_workers(whole) - live)
            self._made = whole, live, whole.replace(failed=dead, backward="mixed") if dead else whole
        return self._made[2]


def all_workers(problem: Problem) -> set[Worker]:
    """All workers of the problem, dead or alive."""
    return {Worker(d, s) for d in range(problem.pipelines) for s in range(problem.stages)}
