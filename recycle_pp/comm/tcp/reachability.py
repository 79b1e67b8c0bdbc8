"""Measures how long attempts to connect to each member have failed. A new mesh does not reset the times.

    reachability = Reachability(patience=10.0, report)      # report(ranks): all attempts failed for `patience` seconds
    reachability.fails(2, 0.1)       # adds 0.1 s in which all attempts to reach member 2 failed
    reachability.reached(2)          # an attempt succeeded, so the time is reset
    reachability.keep({1, 3})        # other ranks are no longer members
    reachability.update(now)         # reports unreachable members, repeatedly, every second

Only time in which attempts were pending counts. A process that was suspended, or that still waits for addresses, has
made no attempts and cannot judge whether a member is reachable.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection

AGAIN = 1.0  # seconds between two reports of the same members


class Reachability:
    """How long this process has failed to reach each member. Methods may be called from any thread.

    patience: seconds of failed attempts after which a member is reported; None: never
    """

    def __init__(self, patience: float | None = None, report: Callable[[list[int]], None] = lambda ranks: None) -> None:
        self._patience, self._report = math.inf if patience is None else patience, report
        self._lock = threading.Lock()
        self._failing: dict[int, float] = {}  # rank -> seconds
        self._reported: tuple[list[int], float] = ([], -math.inf)  # the last report: ranks and time

    def failing(self, rank: int) -> float:
        """Seconds for which attempts to reach the member have failed."""
        with self._lock:
            return self._failing.get(rank, 0.0)

    def fails(self, rank: int, seconds: float) -> None:
        with self._lock:
            self._failing[rank] = self._failing.get(rank, 0.0) + seconds

    def reached(self, rank: int) -> None:
        with self._lock:
            self._failing.pop(rank, None)

    def keep(self, ranks: Collection[int]) -> None:
        with self._lock:
            self._failing = {rank: seconds for rank, seconds in self._failing.items() if rank in ranks}

    def update(self, now: float) -> None:
        with self._lock:
            cut = sorted(rank for rank, seconds in self._failing.items() if seconds >= self._patience)
            before, at = self._reported
            due = bool(cut) and (cut != before or now - at >= AGAIN)
            if due:
                self._reported = cut, now
        if due:
            self._report(cut)
