"""Ends this process when its event loop stands still: a supervisor, and the coordinator in it, that nobody can rely on.

    watchdog = Watchdog(seconds=10.0, what="rank 3")      # a thread; in the process's main thread
    watchdog.beat()                                       # from the loop, often
    watchdog.close()                                      # the loop is about to end

Its connections close at once, so the others know, and elect another coordinator if this one was it; its worker dies
with it. The exit code is 0: a launcher that saw a failure would end the other ranks of the node, which go on. A loop
that still gets processor time has ten times as long, and a pause of the whole process counts for nothing. Where machine
code stands still with the interpreter's lock, this thread cannot run either: then the others hear its silence.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time

from recycle_pp.wire.messages.activity import BUSY

from .vital_signs import Board, VitalSigns

LOOKS = 20  # in `seconds`


class Watchdog:
    def __init__(self, seconds: float, what: str) -> None:
        self._seconds, self._what = seconds, what
        self._age = 0.0  # of the last beat
        self._closed = False
        self._signs = VitalSigns(os.getpid(), Board(bytearray(4096)))
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def beat(self) -> None:
        self._age = 0.0

    def close(self) -> None:
        self._closed = True

    def _watch(self) -> None:
        pause, before = self._seconds / LOOKS, time.monotonic()
        while not self._closed:
            time.sleep(pause)
            now = time.monotonic()
            self._age += min(now - before, 2 * pause)
            before = now
            quiet = self._signs.look(0, 2 * pause).quiet
            if (
                not self._closed
                and self._age > self._seconds
                and (quiet > self._seconds or self._age > BUSY * self._seconds)
            ):
                print(f"recycle_pp: {self._what} ends: its event loop has stood still for {self._age:.1f} s, here:",
                      file=sys.stderr, flush=True)  # fmt: skip
                faulthandler.dump_traceback(all_threads=True)
                os._exit(0)
