"""What a worker's main thread does and how it gets on, seen by its supervisor whatever state the worker is in.

    board = Board(lifeline.memory)                   # both ends
    board.write(7, Activity("works", "F", 20, (1, 3)))       # the worker's main thread, before whatever it does: 2 us
    signs = VitalSigns(pid, board)                   # the supervisor
    signs.look(incarnation=0, most=1.0)              # at every heartbeat: Signs(activity=..., seconds=10.2, ...)

The board lies in memory that both processes share, so it can be read where the worker's interpreter is stuck too (a
thread in machine code that keeps its lock). Ages are added up from look to look: a pause of this very process, as of
the whole machine, makes nobody older.
"""

from __future__ import annotations

import struct
import time
from contextlib import suppress
from mmap import mmap
from pathlib import Path

from recycle_pp.wire.messages.activity import Activity
from recycle_pp.wire.messages.supervisors import Signs

_KINDS = ("starts", "works", "device", "waits")
_WHATS = ("", "F", "I", "W", "B", "O", "R", "V", "data", "checkpoint", "send", "turn", "tensor", "sum", "copy", "links",
          "commit", "orders", "plan", "model", "state", "kernels", "ready")  # fmt: skip
_KIND, _WHAT = ({name: code for code, name in enumerate(names)} for names in (_KINDS, _WHATS))
_NOBODY = (-1, -1)
_ENTRY = struct.Struct("<QdBB?5iQ")  # number, since, kind, what, first, step, micro-batch, peer, number again
_OFFSET = 1024  # behind the lifeline's mutex


class Board:
    def __init__(self, memory: mmap | bytearray) -> None:
        self._memory = memory

    def write(self, number: int, activity: Activity) -> None:
        """number: counts the activities, from 1."""
        kind, what, step, microbatch, peer, first = activity
        _ENTRY.pack_into(
            self._memory, _OFFSET, number, time.monotonic(), _KIND[kind], _WHAT[what], first, step,
            *(microbatch or _NOBODY), *(peer or _NOBODY), number,
        )  # fmt: skip

    def read(self) -> tuple[int, float, Activity] | None:
        """(number, since when, what); number 0 before the first one. None where it is being written."""
        number, since, kind, what, first, step, d, i, pd, ps, again = _ENTRY.unpack_from(self._memory, _OFFSET)
        if number != again:
            return None
        microbatch, peer = (d, i) if d >= 0 else None, (pd, ps) if pd >= 0 else None
        return number, since, Activity(_KINDS[kind], _WHATS[what], step, microbatch, peer, first)


class VitalSigns:
    """Of the process `pid`, whose main thread writes to `board`."""

    def __init__(self, pid: int, board: Board) -> None:
        self._stat, self._board = Path(f"/proc/{pid}/task/{pid}/stat"), board
        self._looked = time.monotonic()
        self._number, self._activity = 0, Activity()
        self._seconds, self._quiet, self._processor = 0.0, 0.0, -1

    def look(self, incarnation: int, most: float) -> Signs:
        """Its signs now. most: seconds between two looks; what is longer was a pause."""
        now = time.monotonic()
        elapsed, self._looked = min(now - self._looked, most), now
        self._seconds += elapsed
        self._quiet += elapsed
        found = self._board.read()
        if found is not None and found[0] != self._number:
            self._number, since, self._activity = found
            self._seconds = min(now - since, elapsed)
            self._quiet = min(self._quiet, self._seconds)
        with suppress(OSError, ValueError, IndexError):
            # proc(5): the name before may hold spaces; then the state, and ticks of 10 ms as user and in the kernel.
            state, *fields = self._stat.read_text().rpartition(")")[2].split()
            processor = int(fields[10]) + int(fields[11])
            if processor != self._processor or state == "R":
                self._processor, self._quiet = processor, 0.0
        return Signs(incarnation, self._number, self._activity, self._seconds, self._quiet)
