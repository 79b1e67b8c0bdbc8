"""Lets the processes of a machine use a folder one at a time.

with turn(folder, progress):    # blocks while another process holds the folder
    ...
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LOOK_SECONDS = 0.1  # between two attempts


@contextmanager
def turn(folder: Path, waits: Callable[[], None]) -> Iterator[None]:
    """Holds the lock of an existing folder. Blocks until the lock is free, and calls `waits` after each failed attempt.

    If the process dies, its lock is released. A file system without locks is used without a lock.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waits()
                time.sleep(LOOK_SECONDS)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(descriptor)
