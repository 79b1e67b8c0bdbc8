"""Decides when refused connections mean that a process is dead.

    refusal = Refusal(seconds=2.0)      # one for each address
    refusal.lasts(place.process)        # after each refused connection; True if that process counts as dead
    refusal.reset()                      # after each attempt that was not refused

A firewall also refuses connections, often only for a few tenths of a second. One refusal is enough if the process is
proven dead (`process_identity`). Otherwise all attempts must be refused for `seconds`. A live process on this machine
never counts as dead.
"""

from __future__ import annotations

import asyncio

from .process_identity import is_dead, is_here

# Seconds of refused connections after which a process counts as dead. Callers use control.suspicion if that is shorter.
REFUSED = 2.0
PAUSE = 2.0  # seconds without an attempt after which the count restarts


class Refusal:
    def __init__(self, seconds: float = REFUSED) -> None:
        self._seconds = seconds
        self._since = self._last = float("-inf")  # times of the first and the last consecutive refusal

    def lasts(self, process: str) -> bool:
        """Records a refused connection. Returns whether the process counts as dead.

        process: `identity` of the process; "" if unknown
        """
        now = asyncio.get_running_loop().time()
        if now - self._last > PAUSE:
            self._since = now
        self._last = now
        return is_dead(process) or (now - self._since >= self._seconds and not is_here(process))

    def reset(self) -> None:
        self._last = float("-inf")
