"""Waits for file descriptors, and raises the limit on their number.

readable(pidfd, 0.5)        # whether the process ends within half a second
raise_limit()               # the number of files that this process and its children may open now
"""

from __future__ import annotations

import resource
import select

ENOUGH = 1 << 18  # open files; a coordinator has a few for each worker of the job


def readable(descriptor: int, seconds: float = 0.0) -> bool:
    """Waits at most `seconds` until `descriptor` can be read without blocking, or its other end is closed.

    select(2) refuses descriptors above 1023, which the coordinator of a large job has.
    """
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(1000 * max(0.0, seconds)))


def raise_limit() -> int:
    """Raises the soft limit of open files to the hard limit, up to ENOUGH, and returns it.

    Most systems set the soft limit to 1,024, for programs that use select(2)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < ENOUGH:
        soft = min(hard, ENOUGH)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft
