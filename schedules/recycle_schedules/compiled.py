"""The inner loops as machine code, without making anybody wait for the compiler.

    loops = Loops()
    loops.load(timeout=1.0)       # True: machine code, from the cache on disk in a fraction of a second
    loops.simulate(...)           # the same function, compiled if it is ready, else plain Python

The first use on a machine compiles, which takes many seconds and happens in a thread; the result is kept beside the
source files (or where NUMBA_CACHE_DIR says). Until then plans are made by the same loops in plain Python.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numba

from . import list_schedule

FUNCTIONS: dict[str, Callable[..., Any]] = {"simulate": list_schedule.simulate}


class Loops:
    """The inner loops as attributes. Reading one never blocks."""

    simulate: Callable[..., Any]

    def __init__(self) -> None:
        self.compiled = False
        self._thread: threading.Thread | None = None
        for name, function in FUNCTIONS.items():
            setattr(self, name, function)

    def load(self, warm: Callable[[Any], None], timeout: float | None = None) -> bool:
        """Fetch or make the machine code; `warm(loops)` calls every loop once. False if that takes longer than
        `timeout` seconds: it goes on in the background, and the loops change over when it is done."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._compile, args=(warm,), name="recycle-schedules-compile")
            self._thread.start()
        self._thread.join(timeout)
        return self.compiled

    def _compile(self, warm: Callable[[Any], None]) -> None:
        fast = Loops()
        for name, function in FUNCTIONS.items():
            setattr(fast, name, numba.njit(cache=True, nogil=True)(function))
        warm(fast)
        for name in FUNCTIONS:
            setattr(self, name, getattr(fast, name))
        self.compiled = True
