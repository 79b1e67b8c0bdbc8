"""Selects the workers to remove if some workers cannot reach each other, although all can reach the coordinator.

lost = workers_to_evict({Worker(1, 0): [Worker(2, 0)], Worker(2, 0): [Worker(1, 0)]}, live)       # {Worker(2, 0)}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from recycle_schedules import Worker

TRIES = 3000  # limit on calls of `look`, because finding the smallest set (a minimum vertex cover) is NP-hard

Links = frozenset[frozenset[Worker]]


def workers_to_evict(unreachable: Mapping[Worker, Iterable[Worker]], live: Collection[Worker]) -> set[Worker]:
    """The fewest workers whose removal leaves no broken link and no empty stage. Empty if there is no such set.

    unreachable: worker -> workers that it cannot reach; one direction is enough
    live: all members; entries about other workers are ignored

    Among sets of equal size, returns the one with the highest workers.
    """
    broken = frozenset(
        frozenset((worker, other))
        for worker, others in unreachable.items()
        for other in others
        if worker in live and other in live and worker != other
    )
    search = _Search(live)
    search.look(frozenset(), broken)
    return set(search.best or ())


class _Search:
    """Searches for the smallest set of workers. Each call of `look` takes the worker with the most broken links, and
    tries to remove either this worker, or all workers at the other ends of its broken links."""

    def __init__(self, live: Collection[Worker]) -> None:
        self._workers = Counter(worker.stage for worker in live)
        self._left = TRIES
        self.best: list[Worker] | None = None  # highest worker first

    def look(self, lost: frozenset[Worker], broken: Links) -> None:
        self._left -= 1
        stages = Counter(worker.stage for worker in lost)
        if any(stages[stage] == self._workers[stage] for stage in stages):
            return
        if self.best is not None and (len(lost) > len(self.best) or self._left < 0):
            return
        if not broken:
            found = sorted(lost, reverse=True)
            if self.best is None or (-len(found), found) > (-len(self.best), self.best):
                self.best = found
            return
        counts = Counter(worker for link in broken for worker in link)
        worst = max(counts, key=lambda worker: (counts[worker], worker))
        others = frozenset(worker for link in broken if worst in link for worker in link) - {worst}
        for leaving in (frozenset((worst,)), others):
            self.look(lost | leaving, frozenset(link for link in broken if not link & leaving))
