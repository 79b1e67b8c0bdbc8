"""Vital signs of a worker's main thread: its current activity, how long that has lasted, and whether the thread runs.

    board = Board(lifeline.memory)                   # in both processes
    board.write(7, Activity("works", "F", 20, (1, 3)))  # in the worker's main thread, before each activity; takes 2 us
    signs = VitalSigns(pid, board)                   # in the supervisor
    signs.sample(incarnation=0, max_interval=1.0)    # at every heartbeat: Signs(activity=..., seconds=10.2, ...)

The board is in shared memory, so the supervisor can read it even if native code blocks the worker's interpreter. Ages
are summed over intervals between samples, so a pause of the supervisor or of the machine adds nothing to them.
"""

from __future__ import annotations

import struct
import time
from contextlib import suppress
from mmap import mmap

from recycle_pp.linux.processes import process_stat, run_delay
from recycle_pp.wire.messages.activity import Activity
from recycle_pp.wire.messages.supervisors import Signs

_KINDS = ("starts", "works", "device", "waits")
_WHATS = ("", "F", "I", "W", "B", "O", "R", "V", "data", "checkpoint", "send", "turn", "tensor", "sum", "copy", "links",
          "commit", "orders", "plan", "model", "state", "kernels", "ready", "inputs")  # fmt: skip
_KIND, _WHAT = ({name: code for code, name in enumerate(names)} for names in (_KINDS, _WHATS))
_NONE = (-1, -1)
# number, time of the start, kind, what, first, step, micro-batch, peer, copy of the number
_ENTRY = struct.Struct("<QdBB?5iQ")
_OFFSET = 1024  # after the lifeline's mutex


class Board:
    def __init__(self, memory: mmap | bytearray) -> None:
        self._memory = memory

    def write(self, number: int, activity: Activity) -> None:
        """Makes `activity` the current activity. number: serial number of the activity, starting at 1."""
        kind, what, step, microbatch, peer, first = activity
        _ENTRY.pack_into(
            self._memory, _OFFSET, number, time.monotonic(), _KIND[kind], _WHAT[what], first, step,
            *(microbatch or _NONE), *(peer or _NONE), number,
        )  # fmt: skip

    def read(self) -> tuple[int, float, Activity] | None:
        """The current activity: (serial number, time.monotonic() of its start, the activity). The number is 0 before
        the first activity. None during a write, when the two copies of the number differ."""
        number, since, kind, what, first, step, d, i, pd, ps, again = _ENTRY.unpack_from(self._memory, _OFFSET)
        if number != again:
            return None
        microbatch, peer = (d, i) if d >= 0 else None, (pd, ps) if pd >= 0 else None
        return number, since, Activity(_KINDS[kind], _WHATS[what], step, microbatch, peer, first)


class VitalSigns:
    """Vital signs of process `pid`, whose main thread writes to `board`."""

    def __init__(self, pid: int, board: Board) -> None:
        self._pid = pid
        self._board = board
        self._sampled = time.monotonic()
        self._number = 0
        self._activity = Activity()
        self._seconds = 0.0
        self._quiet = 0.0
        self._cpu_ticks = -1
        self._delay: float | None = None  # run delay since the start of the thread, at the last sample
        self._delayed = 0.0

    def sample(self, incarnation: int, max_interval: float) -> Signs:
        """The vital signs now.

        max_interval: maximum number of seconds to count since the last call; the rest was a pause
        """
        now = time.monotonic()
        elapsed = min(now - self._sampled, max_interval)
        self._sampled = now
        self._seconds += elapsed
        self._quiet += elapsed
        with suppress(OSError, IndexError):
            before, self._delay = self._delay, run_delay(self._pid, thread=self._pid)
            self._delayed += 0.0 if before is None else self._delay - before
        found = self._board.read()
        if found is not None and found[0] != self._number:
            self._number, since, self._activity = found
            self._seconds = min(now - since, elapsed)
            self._quiet = min(self._quiet, self._seconds)
            self._delayed = min(self._delayed, self._seconds)
        suspended = False
        with suppress(OSError):
            stat = process_stat(self._pid, thread=self._pid)
            if stat is not None and (stat.cpu_ticks != self._cpu_ticks or stat.state == "R"):
                self._cpu_ticks = stat.cpu_ticks
                self._quiet = 0.0
            suspended = stat is not None and stat.suspended
        return Signs(incarnation, self._number, self._activity, self._seconds, self._quiet, self._delayed, suspended)
