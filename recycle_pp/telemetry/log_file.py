"""A text file that only grows, written by a thread: no caller ever waits for its disk.

    log = LogFile(run.log("1.2"))
    log.write(b"ready after 2.1 s\\n")     # any thread; never blocks
    log.flush(2.0)                        # blocks until everything is on its way to the disk, 2 s at most

The queue holds MOST_BYTES. While it is full, lines are dropped; the file says later how many are missing. The same
holds for lines that the disk refused: it was full, or read-only.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from .background import Background
from .warn import warn_once
from .words import plural

MOST_BYTES = 1 << 20


class LogFile:
    """Makes the file, and its folder, with the first line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._later = Background(f"log {path.name}")
        self._lock = threading.Lock()  # guards the next two
        self._queued = self._missing = 0  # bytes in the queue; lines that were dropped and not reported yet
        self._file = -1

    def write(self, data: bytes) -> None:
        with self._lock:
            if self._queued + len(data) > MOST_BYTES:
                self._missing += data.count(b"\n")
                return
            missing, self._missing = self._missing, 0
            self._queued += len(data)
        self._later(self._append, data, missing)

    def flush(self, seconds: float) -> bool:
        """Whether the disk answered in time."""
        return self._later.flush(seconds)

    def close(self) -> None:
        """Closes the file after the last line; the next line opens it again."""
        self._later(self._close)

    def _append(self, data: bytes, missing: int) -> None:
        """missing: lines before these."""
        with self._lock:
            self._queued -= len(data)
        note = f"... {plural(missing, 'line')} left out: the disk did not take them\n".encode() if missing else b""
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
