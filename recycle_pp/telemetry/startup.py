"""Prints the current activity of a starting process every few seconds, until the job prints its own lines.

    startup.begin("reads the configuration")     # prints a line every `SECONDS` seconds from now on
    startup.update("measures the layers")        # the next activity
    startup.end()

A separate thread prints, because the main thread is blocked in an import, a file system or a wait for a child process.
This module imports no other module of the project, because a slow import may cause the delay.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress

SECONDS = 4.0  # seconds between two lines


class _Announcer:
    """Prints the current activity until `over` is set."""

    def __init__(self, words: str) -> None:
        self.words = words
        self.begun = time.monotonic()
        self.over = threading.Event()
        threading.Thread(target=self._run, name="startup", daemon=True).start()

    def _run(self) -> None:
        while not self.over.wait(SECONDS):
            with suppress(OSError, ValueError):  # standard output is closed
                print(f"recycle_pp: {self.words} ({time.monotonic() - self.begun:.0f} s)", flush=True)


_now: _Announcer | None = None


def begin(words: str) -> None:
    global _now
    end()
    _now = _Announcer(words)


def update(words: str) -> None:
    """Replaces the activity; does nothing after `end`."""
    if _now is not None:
        _now.words = words


def end() -> None:
    """Stops printing."""
    global _now
    if _now is not None:
        _now.over.set()
    _now = None
