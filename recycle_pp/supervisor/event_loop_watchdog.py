"""Ends this supervisor, and the coordinator if it runs here, when the supervisor's event loop is blocked.

    watchdog = EventLoopWatchdog(seconds=10.0, what="rank 3")      # in the main thread; starts a thread
    watchdog.beat()                                       # call it often, in the loop
    watchdog.close()                                      # before the loop ends

The exit closes the connections at once, so the other supervisors notice and elect another coordinator if necessary. The
worker dies with its supervisor. The exit code is 0, because after a failure the launcher would end the node's other
ranks. The limit is ten times as long for a loop that uses processor time, and pauses of the whole process do not count.
If native code blocks while it holds the interpreter's lock, the watchdog's thread cannot run either; then the other
supervisors detect the silence.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time

from recycle_pp.wire.messages.activity import BUSY

from .vital_signs import Board, VitalSigns

CHECKS = 20  # checks within `seconds`


class EventLoopWatchdog:
    def __init__(self, seconds: float, what: str) -> None:
        self._seconds = seconds
        self._what = what
        self._age = 0.0  # seconds since the last beat
        self._closed = False
        self._signs = VitalSigns(os.getpid(), Board(bytearray(4096)))
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def beat(self) -> None:
        self._age = 0.0

    def close(self) -> None:
        self._closed = True

    def _watch(self) -> None:
        pause = self._seconds / CHECKS
        before = time.monotonic()
        while not self._closed:
            time.sleep(pause)
            now = time.monotonic()
            self._age += min(now - before, 2 * pause)
            before = now
            quiet = self._signs.sample(0, 2 * pause).quiet
            if (
                not self._closed
                and self._age > self._seconds
                and (quiet > self._seconds or self._age > BUSY * self._seconds)
            ):
                faulthandler.dump_traceback(all_threads=True)
                blocked = f"its event loop has been blocked for {self._age:.1f} s; the stacks above show where"
                print(f"recycle_pp: {self._what} exits: {blocked}", file=sys.stderr, flush=True)
                os._exit(0)
