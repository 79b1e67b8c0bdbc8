"""The leader's lease: its right to act, based on a recent confirmation by a majority.

    lease = LeaderLease(agreement, suspicion=5.0)
    lease.term                      # the leader's term, as confirmed by the majority
    lease.held                      # False after a suspension or a loss of contact, until a majority has answered again
    await lease.wait()              # returns when the lease is held; raises Deposed if the lease is lost for good
    await lease.fresh()             # returns when the last confirmation is recent enough to judge others' silence
    await lease.lost()              # returns when the lease is lost for good
    lease.lapsed(seconds)           # whether in the last `seconds` seconds the lease was renewed after it had expired
    lease.permits()                 # blocks a thread; returns True once the lease is held, False if it is lost for good
    lease.close()                   # at the end of the job: the lease counts as held from now on

After a suspension, a process does not know whether another leader was elected. A leader that receives no messages does
not know whether its own messages still arrive. In both cases the lease has expired, and the leader must renew it before
it sends, writes or decides anything.

Before a leader declares a silent or disconnected process dead, it needs a fresh lease: a majority must have answered
within half of `suspicion`. Otherwise a leader that can send but not receive would cause healthy workers to be killed.
A leader that gets no majority in `ATTEMPTS` rounds loses the lease for good (CheckQuorum in Raft's terms).
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from .agreement import PLANNING, Agreement, Deposed, LostMajority

ATTEMPTS = 2  # rounds without a majority after which the lease is lost; each round is as long as the lease
RENEWALS = 3  # renewals within the time for which a confirmation is fresh


def lease_seconds(suspicion: float) -> float:
    """Seconds for which a confirmation is valid. This is less than the silence after which supervisors elect another
    leader, and more than a round trip on a slow network."""
    return suspicion + PLANNING / 2


def clock() -> float:
    """Seconds on a clock that, unlike time.monotonic, also counts suspensions of the machine."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaderLease:
    """The lease of this supervisor as the leader.

    suspicion: seconds of silence after which a peer is declared dead
    """

    def __init__(self, agreement: Agreement, suspicion: float) -> None:
        self._agreement = agreement
        self._seconds = lease_seconds(suspicion)
        self._fresh = suspicion / 2  # seconds for which a confirmation is fresh
        self._until = -math.inf  # the lease is held until this time (see `clock`)
        self._regained = -math.inf  # time of the last renewal of an expired lease
        self.term = -1  # term of the leader; -1 until the lease is held for the first time
        self._ended = False
        self._updated = asyncio.Event()  # set and replaced at each renewal and at the loss
        self._changed = threading.Condition()  # notified at the same times, for threads
        self._renewing = asyncio.create_task(self._renew())

    @property
    def held(self) -> bool:
        """Whether the lease is held now. May be read from any thread."""
        return clock() < self._until

    def lapsed(self, seconds: float) -> bool:
        """Whether in the last `seconds` seconds the lease was renewed after it had expired. If so, this leader may have
        been silent so long that others have closed their connections to it."""
        return clock() - self._regained < seconds

    async def wait(self) -> None:
        await self._wait_until(lambda: self.held)

    async def fresh(self) -> None:
        await self._wait_until(lambda: clock() < self._until - self._seconds + self._fresh)

    async def lost(self) -> None:
        """Returns when the lease is lost for good. Never returns if the lease is closed at the end of the job."""
        while self.held or not self._ended:
            await self._updated.wait()

    def permits(self) -> bool:
        """Blocks the calling thread until the lease is held (True) or lost (False)."""
        with self._changed:
            while not self.held:
                if self._ended:
                    return False
                self._changed.wait(self._seconds)
            return True

    def close(self) -> None:
        """Ends the renewals at the end of the job. The lease counts as held from now on."""
        if not self._ended:
            self._end(math.inf)

    def revoke(self) -> None:
        """Loses the lease for good, because another supervisor leads."""
        if not self._ended:
            self._end(-math.inf)

    async def _wait_until(self, permitted: Callable[[], bool]) -> None:
        """Returns when `permitted()` is true. Raises Deposed if the lease is lost first."""
        while not permitted():
            if self._ended:
                raise Deposed("another supervisor coordinates now")
            await self._updated.wait()

    async def _renew(self) -> None:
        failures = 0
        while failures < ATTEMPTS:
            asked = clock()
            try:
                async with asyncio.timeout(self._seconds):
                    term = await self._agreement.confirm(self.held)
            except TimeoutError:  # also occurs after a suspension of this process, even if the answers have arrived
                failures += 1
                continue
            except (Deposed, LostMajority):
                break
            failures = 0
            self.term = term
            if not self.held and self._until > -math.inf:
                self._regained = clock()
            self._set(asked + self._seconds)
            await asyncio.sleep(self._fresh / RENEWALS)
        self.revoke()

    def _end(self, until: float) -> None:
        self._ended = True
        with suppress(RuntimeError):  # the loop is closed
            if self._renewing is not asyncio.current_task():
                self._renewing.cancel()
        self._set(until)

    def _set(self, until: float) -> None:
        with self._changed:
            self._until = until
            self._changed.notify_all()
        self._updated.set()
        self._updated = asyncio.Event()
