"""When a refused connection shows that a process has ended.

    refusal = Refusal(seconds=2.0)      # one for each address
    refusal.lasts(place.process)        # after each refused connection: True if that process counts as ended
    refusal.over()                      # after each attempt that was not refused

A firewall that rejects refuses connections, too, often for a few tenths of a second only. So a refusal is final at once
only if that process ran on this machine, under this boot, and its process id is gone (`process_identity`). Otherwise
attempts must be refused for `seconds` on end, and a process of this machine that still runs never counts as ended.
"""

from __future__ import annotations

import asyncio

from .process_identity import is_dead, is_here

REFUSED = 2.0  # seconds; control.suspicion if that is shorter
PAUSE = 2.0  # seconds without an attempt after which the count restarts


class Refusal:
    def __init__(self, seconds: float = REFUSED) -> None:
        self._seconds = seconds
        self._since = self._last = float("-inf")  # of the refusals on end: the first, the last

    def lasts(self, process: str) -> bool:
        """Counts a refused connection to that process (`process_identity.identity`, "" if not known)."""
        now = asyncio.get_running_loop().time()
        if now - self._last > PAUSE:
            self._since = now
        self._last = now
        return is_dead(process) or (now - self._since >= self._seconds and not is_here(process))

    def over(self) -> None:
        self._last = float("-inf")
