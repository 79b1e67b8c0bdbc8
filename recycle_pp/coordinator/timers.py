"""Delayed calls in the event loop. An exception in one of them ends the job with its traceback.

timers = Timers(lifecycle, lease)
timers.after(0.3, explain, rank)
timers.close()

If this process does not hold the leader's lease when a call becomes due, the call is delayed again. This way, time in
which this process was suspended does not count as silence of other processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from recycle_pp.consensus.leader_lease import LeaderLease

from .lifecycle import Lifecycle


class Timers:
    def __init__(self, lifecycle: Lifecycle, lease: LeaderLease) -> None:
        self._lifecycle = lifecycle
        self._lease = lease
        self._waiting: set[asyncio.TimerHandle] = set()

    def after(self, seconds: float, function: Callable[..., None], *arguments: Any) -> Callable[[], None]:
        """Calls function(*arguments) after a delay. Returns a function that cancels the call; use it only in the event
        loop's thread."""

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
            except Exception:  # the event loop would only log the exception
                self._lifecycle.failed()

        def cancel() -> None:
            self._waiting.discard(handle)
            handle.cancel()

        start()
        return cancel

    def close(self) -> None:
        """Cancels all calls."""
        for handle in self._waiting:
            handle.cancel()
        self._waiting.clear()
