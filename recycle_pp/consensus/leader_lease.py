"""A leader's right to act: a majority has confirmed it a short while ago.

    lease = LeaderLease(agreement, suspicion=5.0, lost=give_way)
    lease.term                      # of the leader, as the majority knows it
    lease.held                      # False after a suspension or a cut, until a majority has answered
    await lease.wait()              # returns when it is held; Deposed when it is lost for good
    await lease.fresh()             # returns when a majority has answered so lately that silence of others is theirs
    lease.lapsed(seconds)           # whether it was lost and regained within the last seconds
    lease.permits()                 # the same as `wait` for a thread: True when held, False when lost
    lease.close()                   # the job is over: nothing needs to be asked any more

A process that was suspended does not know that others have elected another leader; a leader that hears nobody does not
know that others still hear it. Both find their lease expired, and ask before they send, write or judge anything. To
call others silent, or dead because a connection broke, takes more: a majority must have answered within half of the
time of silence. Otherwise a deaf leader, which others still hear, would order their healthy workers to be killed. A
leader that gets no majority in `ATTEMPTS` rounds loses the lease for good (CheckQuorum in the terms of Raft).
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from .agreement import PLANNING, Agreement, Deposed, LostMajority

ATTEMPTS = 2  # rounds of questions, each as long as the lease
RENEWALS = 3  # in the time for which a confirmation is fresh


def lease_seconds(suspicion: float) -> float:
    """How long a confirmation is valid: shorter than the silence after which other supervisors elect another leader,
    longer than a question and its answer on a slow network."""
    return suspicion + PLANNING / 2


def clock() -> float:
    """Seconds. Unlike time.monotonic, this clock also counts while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaderLease:
    """suspicion: seconds of silence after which others are given up. lost(): called once in the event loop, when the
    lease is lost."""

    def __init__(self, agreement: Agreement, suspicion: float, lost: Callable[[], None]) -> None:
        self._agreement, self._seconds, self._lost = agreement, lease_seconds(suspicion), lost
        self._fresh = suspicion / 2  # seconds
        self._until = -math.inf
        self._regained = -math.inf  # when it was last held again
        self.term = -1  # known as soon as the lease is held for the first time
        self._over = False
        self._news = asyncio.Event()  # set, and replaced, whenever the lease was renewed or lost
        self._changed = threading.Condition()  # the same for threads
        self._keeping = asyncio.create_task(self._keep())

    @property
    def held(self) -> bool:
        """Any thread."""
        return clock() < self._until

    def lapsed(self, seconds: float) -> bool:
        """Whether the lease was lost and regained in the last `seconds`: then this leader may have been silent for so
        long that others closed their connections to it."""
        return clock() - self._regained < seconds

    async def wait(self) -> None:
        await self._wait_until(lambda: self.held)

    async def fresh(self) -> None:
        await self._wait_until(lambda: clock() < self._until - self._seconds + self._fresh)

    def permits(self) -> bool:
        """Blocks the calling thread until the lease is held (True) or lost (False)."""
        with self._changed:
            while not self.held:
                if self._over:
                    return False
                self._changed.wait(self._seconds)
            return True

    def close(self) -> None:
        """The job has ended while the lease was held: it is held from now on."""
        if not self._over:
            self._end(math.inf)

    def revoke(self) -> None:
        """Another supervisor leads: the lease is lost."""
        if not self._over:
            self._end(-math.inf)

    async def _wait_until(self, permitted: Callable[[], bool]) -> None:
        """Deposed if the lease is lost before."""
        while not permitted():
            if self._over:
                raise Deposed("another supervisor coordinates now")
            await self._news.wait()

    async def _keep(self) -> None:
        failures = 0
        while failures < ATTEMPTS:
            asked = clock()
            try:
                async with asyncio.timeout(self._seconds):
                    term = await self._agreement.confirm(self.held)
            except TimeoutError:  # also after a suspension, however soon the answers come
                failures += 1
                continue
            except (Deposed, LostMajority):
                break
            failures, self.term = 0, term
            if not self.held and self._until > -math.inf:
                self._regained = clock()
            self._set(asked + self._seconds)
            await asyncio.sleep(self._fresh / RENEWALS)
        self.revoke()
        self._lost()

    def _end(self, until: float) -> None:
        self._over = True
        with suppress(RuntimeError):  # the loop is closed
            if self._keeping is not asyncio.current_task():
                self._keeping.cancel()
        self._set(until)

    def _set(self, until: float) -> None:
        with self._changed:
            self._until = until
            self._changed.notify_all()
        self._news.set()
        self._news = asyncio.Event()
