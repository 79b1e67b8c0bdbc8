"""Whom to give up when some workers cannot reach each other, though all of them reach the coordinator.

lost = give_up({Worker(1, 0): [Worker(2, 0)], Worker(2, 0): [Worker(1, 0)]})       # {Worker(2, 0)}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from recycle_schedules import Worker


def give_up(unreachable: Mapping[Worker, Iterable[Worker]]) -> set[Worker]:
    """Whose loss leaves nobody who cannot reach another one. unreachable: what each worker says.

    One after the other, who has the most broken links; of several, the highest worker, so that what one node says and
    what the other one says leads to the same loss. Few more than needed: a smallest set is a vertex cover, NP-hard.
    """
    broken = {frozenset((worker, other)) for worker, others in unreachable.items() for other in others}
    lost: set[Worker] = set()
    while broken:
        counts = Counter(worker for link in broken for worker in link)
        worst = max(counts, key=lambda worker: (counts[worker], worker))
        lost.add(worst)
        broken = {link for link in broken if worst not in link}
    return lost
