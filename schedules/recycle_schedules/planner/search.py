"""The search for a good schedule: a portfolio of list schedules, then local search from the best ones.

for schedule in search(instance, target): ...     # ever better; the caller decides when to stop
"""

from __future__ import annotations

from collections.abc import Iterator

from ..compiled import LOOPS
from .candidates import improved, portfolio
from .initial_search import initial, policies
from .instance import Instance
from .partial_schedule import PartialSchedule, value
from .policies import Choices

SMALL = 6_000
"""Maximum number of ops for which the first schedule already uses local search."""
MOVED = 60_000
"""Maximum number of ops for which local search continues while there is time."""


def search(x: Instance, target: int, known: PartialSchedule | None = None) -> Iterator[PartialSchedule]:
    """Yield the best schedule so far, after each slice of work. A slice takes about 0.2 s at most.

    target: a value in ticks, such as a lower bound; the search ends once a schedule reaches it.
    known: a schedule; the results are never worse than it.

    The search for a large job tries list schedules only, and ends with the last policy. Any other search ends when it
    meets the target, or when the caller stops it."""

    def better(schedule: PartialSchedule) -> PartialSchedule:
        """The better one of `schedule` and `known`."""
        return schedule if known is None else min(schedule, known, key=lambda s: value(x, s))

    size = x.size
    slow = 1 if LOOPS.compiled else 10  # uncompiled loops try a tenth of the policies
    small = LOOPS.compiled and size < SMALL
    if small and not x.problem.remainder:
        best = better(initial(x, target))
        yield best
    choices = Choices.of(x, turns=3 if size < 200_000 else 1)
    table = choices.table(max(12, min(600, 3_000_000 // size) // slow))
    tried = policies(x) // slow or 1
    if not small or x.problem.remainder:
        best = better(portfolio(x, choices, table[:tried], target, keep=1)[0])
        if value(x, best) > target and small:  # only a short search, because workers wait for the plan
            best = improved(x, best, target, min(400, MOVED // size), 0)
        yield best
    schedules = [best]
    some = max(1, 1_500_000 // size // slow)
    for r in range(tried, len(table), some):
        if value(x, best) <= target:
            return
        schedules = sorted(
            [*schedules, *portfolio(x, choices, table[r : r + some], target)], key=lambda d: value(x, d)
        )[:6]
        best = schedules[0]
        yield best
    seed = 0
    while value(x, best) > target and size < MOVED:
        k = seed % len(schedules)
        iterations = max(50, min(50 * size, 8_000_000 // size, 500 << min(seed, 10)))
        heat, weight = ((0.2, 1.0), (0.5, 8.0), (0.2, 1.0), (0.1, 8.0))[seed % 4]
        schedules[k] = improved(x, schedules[k], target, iterations, seed, heat, (0.75, 0.5, 0.25)[seed % 3], weight)
        best = min(best, schedules[k], key=lambda schedule: value(x, schedule))
        seed += 1
        yield best
