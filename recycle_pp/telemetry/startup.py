"""Says every few seconds what this process does at its start, until the job itself has something to say.

    startup.begin("reads the configuration")     # from now on a line every `SECONDS` seconds
    startup.update("measures the layers")       # what it does now
    startup.end()

A thread prints, because the main thread is in an import, a file system or a child process. Imports nothing, as a cold
import may be what takes long.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress

SECONDS = 4.0  # between two lines


class _Said:
    """What is being done, and until when a line about it is wanted."""

    def __init__(self, words: str) -> None:
        self.words, self.begun, self.over = words, time.monotonic(), threading.Event()
        threading.Thread(target=self._run, name="startup", daemon=True).start()

    def _run(self) -> None:
        while not self.over.wait(SECONDS):
            with suppress(OSError, ValueError):  # nobody reads
                print(f"recycle_pp: {self.words} ({time.monotonic() - self.begun:.0f} s)", flush=True)


_now: _Said | None = None


def begin(words: str) -> None:
    global _now
    end()
    _now = _Said(words)


def update(words: str) -> None:
    """The same start, another part of it; nothing if it has ended."""
    if _now is not None:
        _now.words = words


def end() -> None:
    """Prints nothing from now on."""
    global _now
    if _now is not None:
        _now.over.set()
    _now = None
