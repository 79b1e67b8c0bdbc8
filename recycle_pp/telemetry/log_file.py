"""A text file that only grows. A thread writes it, so no caller waits for the disk.

    log = LogFile(run.log("1.2"))
    log.write(b"ready after 2.1 s\\n")     # any thread; never blocks
    log.flush(2.0)                        # blocks for up to 2 s until all lines are written

The queue holds CAPACITY bytes. Lines are dropped while the queue is full, or while the disk is full or read-only. The
file later reports how many lines were dropped.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from .background import Background
from .warn import warn_once
from .words import plural

CAPACITY = 1 << 20  # bytes


class LogFile:
    """A log file. The first write creates the file and its folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._later = Background(f"log {path.name}")
        self._lock = threading.Lock()  # guards the next two attributes
        self._queued = self._missing = 0  # bytes in the queue; dropped lines that are not reported yet
        self._file = -1

    def write(self, data: bytes) -> None:
        with self._lock:
            if self._queued + len(data) > CAPACITY:
                self._missing += data.count(b"\n")
                return
            missing = self._missing
            self._missing = 0
            self._queued += len(data)
        self._later(self._append, data, missing)

    def flush(self, seconds: float) -> bool:
        """Blocks until all lines are written (True), or for `seconds` (False)."""
        return self._later.flush(seconds)

    def close(self) -> None:
        """Closes the file after the queued lines. A later line reopens it."""
        self._later(self._close)

    def _append(self, data: bytes, missing: int) -> None:
        """Writes the data to the file. missing: number of dropped lines before this data."""
        with self._lock:
            self._queued -= len(data)
        note = f"... {plural(missing, 'line')} left out: the disk rejected them\n".encode() if missing else b""
        try:
            if self._file < 0:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            left = note + data
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            warn_once(f"{self.path} cannot be written: {error.strerror}")
            with self._lock:
                self._missing += missing + data.count(b"\n")

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
