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
        """whole: the problem without deaths. After a death the backward may be split, as peers need every bubble."""
        live = frozenset(live)
        if self._made is None or self._made[0] is not whole or self._made[1] != live:
            dead = sorted(all_workers(whole) - live)
            self._made = whole, live, whole.replace(failed=dead, backward="mixed") if dead else whole
        return self._made[2]


def all_workers(problem: Problem) -> set[Worker]:
    """All workers of the problem, dead or alive."""
    return {Worker(d, s) for d in range(problem.pipelines) for s in range(problem.stages)}
