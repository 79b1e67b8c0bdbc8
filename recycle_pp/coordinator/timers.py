"""Calls that come later, in the event loop; a mistake in one of them ends the job, with its traceback.

timers = Timers(failed, lease)          # failed(traceback)
timers.after(0.3, explain, rank)
timers.close()

A call that comes due while the leader's lease is not held starts over when it is held again: a suspension of this
process counts as nothing that others failed to do.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from typing import Any

from recycle_pp.consensus.leader_lease import LeaderLease


class Timers:
    def __init__(self, failed: Callable[[str], None], lease: LeaderLease) -> None:
        self._failed = failed
        self._lease = lease
        self._waiting: set[asyncio.TimerHandle] = set()

    def after(self, seconds: float, function: Callable[..., None], *arguments: Any) -> Callable[[], None]:
        """Returns what calls it off; to be called from the loop, also after it came."""

        handle: asyncio.TimerHandle

        def start() -> None:
            nonlocal handle
            handle = asyncio.get_running_loop().call_later(seconds, call)
            self._waiting.add(handle)

        def call() -> None:
            self._waiting.discard(handle)
            if not self._lease.held:
                start()
                return
            try:
                function(*arguments)
            except Exception:  # the loop would only log it
                self._failed(traceback.format_exc())

        def call_off() -> None:
            self._waiting.discard(handle)
            handle.cancel()

        start()
        return call_off

    def close(self) -> None:
        """None of them comes any more."""
        for handle in self._waiting:
            handle.cancel()
        self._waiting.clear()
