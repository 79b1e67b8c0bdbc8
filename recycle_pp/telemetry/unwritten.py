"""Lines of a run folder that are not on its disk yet. The coordinator keeps them, and all supervisors keep copies.

    unwritten = Unwritten()                 # on the coordinator; `Lines` adds, writes and removes
    unwritten.share(send)                   # sends copies to all supervisors, see `look`
    unwritten.look()                        # after each line, and every second
    kept = Unwritten()                      # on a supervisor
    kept.receive(message)                   # keeps the copies
    unwritten.adopt(kept, "metrics.jsonl")  # on the next coordinator, which runs in one of these supervisors

Copies exist only while a line has waited for longer than LATE_SECONDS. So a fast disk causes no messages.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from itertools import islice, takewhile
from typing import NamedTuple

from recycle_pp.wire.messages.supervisors import KeepLines, Line

LATE_SECONDS = 0.1
MOST_BYTES = 16 << 20  # limit for all lines together; a line of metrics has 0.5 kB
CHUNK = 1 << 20  # bytes of lines in a message


class _Entry(NamedTuple):
    line: Line
    since: float  # monotonic seconds


_Queue = OrderedDict[int, _Entry]
"""The lines of a file by number, oldest first"""


class Unwritten:
    """The lines that wait for the disk, in a queue for each file. Beyond MOST_BYTES the oldest lines are dropped and
    counted. A second thread may call the writer's methods other than `add` and `adopt`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the next four attributes
        self._queues: defaultdict[str, _Queue] = defaultdict(OrderedDict)
        self._next = 1  # number of the next line
        self._bytes = 0
        self._dropped = Counter[str]()  # by file
        self._send: Callable[[KeepLines], None] | None = None
        self._shared = False  # whether supervisors may have copies
        self._copied = 0  # number of the newest copied line; 0: all lines must be copied

    # -- the writer ----------------------------------------------------------------------------------------------

    def add(self, file: str, step: int, record: bytes, since: float | None = None) -> int:
        """Adds a line, and returns its number.

        record: the line. An empty record is a cut: it removes the lines of `step` and later steps, here and in the file
        since:  time.monotonic() at which the line began to wait; None: now
        """
        with self._lock:
            line = Line(self._next, file, step, record)
            self._next += 1
            self._add(line, time.monotonic() if since is None else since)
        return line.number

    def adopt(self, kept: Unwritten, file: str) -> None:
        """Adds the copies that this process keeps for a lost coordinator."""
        for line in kept.lines(file):
            self.add(file, line.step, line.record, since=-math.inf)
        self._dropped[file] += kept.dropped(file)
        self._shared = True

    def lines(self, file: str) -> list[Line]:
        with self._lock:
            return [entry.line for entry in self._queues[file].values()]

    def oldest(self, file: str) -> Line | None:
        with self._lock:
            return next((entry.line for entry in self._queues[file].values()), None)

    def remove(self, line: Line) -> None:
        """Removes a line that is on the disk or no longer needed."""
        with self._lock:
            self._remove(line)

    def dropped(self, file: str) -> int:
        """Number of lines of this file dropped since the last call."""
        with self._lock:
            return self._dropped.pop(file, 0)

    # -- copies --------------------------------------------------------------------------------------------------

    def share(self, send: Callable[[KeepLines], None]) -> None:
        """Sets the function that sends a message to all supervisors."""
        self._send = send

    def look(self) -> None:
        """Sends copies of new lines if a line is late. Otherwise makes the supervisors drop their copies."""
        if self._send is None:
            return
        if self._is_late():
            for message in self._messages(self._copied, self._next):
                self._send(message)
            self._shared = True
            self._copied = self._next - 1
        elif self._shared:
            self._shared = False
            self._copied = 0
            self._send(KeepLines([], whole=True, first=0, dropped={}))

    def share_with(self, send: Callable[[KeepLines], None]) -> None:
        """Sends all copies to a supervisor that has just connected."""
        for message in self._messages(0, self._copied + 1):
            send(message)

    def receive(self, message: KeepLines) -> None:
        """Keeps the copies in a message, and drops copies that are no longer needed."""
        with self._lock:
            self._dropped = Counter(message.dropped)
            for queue in self._queues.values():
                for entry in list(takewhile(lambda e: message.whole or e.line.number < message.first, queue.values())):
                    self._remove(entry.line)
            for line in message.lines:
                self._add(line, 0.0)

    def _is_late(self) -> bool:
        late = time.monotonic() - LATE_SECONDS
        with self._lock:
            return any(entry.since < late for entry in self._heads())

    def _messages(self, copied: int, end: int) -> Iterator[KeepLines]:
        """Yields messages with the lines whose numbers are above `copied` (0 for all lines) and below `end`."""
        with self._lock:
            dropped = dict(self._dropped)
            first = min((entry.line.number for entry in self._heads()), default=self._next)
            newest = [
                takewhile(lambda entry: entry.line.number > copied, reversed(queue.values()))
                for queue in self._queues.values()
            ]
            lines = sorted(e.line for part in newest for e in part if e.line.number < end)
        whole, count, size = copied == 0, 0, 0
        for number, line in enumerate(lines):
            size += len(line.record)
            if size > CHUNK or number == len(lines) - 1:
                yield KeepLines(lines[count : number + 1], whole, first, dropped)
                whole, count, size = False, number + 1, 0

    # -- with the lock -------------------------------------------------------------------------------------------

    def _heads(self) -> Iterator[_Entry]:
        return (next(iter(queue.values())) for queue in self._queues.values() if queue)

    def _add(self, line: Line, since: float) -> None:
        if not line.record:
            for undone in [each for each in _records(self._queues[line.file]) if each.step >= line.step]:
                self._remove(undone)
        self._queues[line.file][line.number] = _Entry(line, since)
        self._bytes += len(line.record)
        while self._bytes > MOST_BYTES:
            oldest = min(line for queue in self._queues.values() for line in islice(_records(queue), 1))
            self._remove(oldest)
            self._dropped[oldest.file] += 1

    def _remove(self, line: Line) -> None:
        if self._queues[line.file].pop(line.number, None) is not None:
            self._bytes -= len(line.record)


def _records(queue: _Queue) -> Iterator[Line]:
    """All lines except cuts, which must not be dropped."""
    return (entry.line for entry in queue.values() if entry.line.record)
