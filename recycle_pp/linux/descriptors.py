"""Waiting for file descriptors.

readable(pidfd, 0.5)        # whether the process ends within half a second
"""

from __future__ import annotations

import select


def readable(descriptor: int, seconds: float = 0.0) -> bool:
    """Waits at most `seconds` until `descriptor` can be read without blocking, or its other end is closed.

    select(2) refuses descriptors above 1023, which the coordinator of a large job has.
    """
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(1000 * seconds))
