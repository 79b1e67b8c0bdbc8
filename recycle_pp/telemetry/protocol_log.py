"""Writes protocol.jsonl: every event of the job, so that its decisions can be repeated (`python -m recycle_pp.replay`).

    log = ProtocolLog(run.protocol, term, permitted)
    log.began(job)                      # a new job; its snapshot is written with its first event
    log.handled(job, event, outcome)    # after each event
    await log.flushed(5.0)

The log of a job starts with its snapshot. A new snapshot replaces the content of the file at each checkpoint except the
last one, and when the file exceeds MOST_BYTES. A thread writes, so the job never waits for the disk. If the disk is
slow or full, lines are left out, and another snapshot follows when the disk works again.
"""

from __future__ import annotations

import os
import time
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path

from recycle_pp.protocol.event_json import encode, fingerprint
from recycle_pp.protocol.events import Event, Outcome
from recycle_pp.protocol.job import Job
from recycle_pp.protocol.snapshot import snapshot

from .background import Background
from .guard import guarded
from .warn import warn_once

MOST_BYTES = 64 * 2**20
DELAY_SECONDS = 0.1  # longer than most recoveries, so that encoding events does not slow them down
AGAIN_SECONDS = 10.0  # between two snapshots while lines are left out


class ProtocolLog:
    """Writes the protocol.jsonl at `path`.

    term       returns the writer's current term
    permitted  see `Background`
    """

    def __init__(self, path: Path, term: Callable[[], int], permitted: Callable[[], bool]) -> None:
        self._path = path
        self._term = term
        self._later = Background("protocol log", delay=DELAY_SECONDS)
        self._later.permitted = permitted
        self._file = -1
        self._bytes = 0  # size of the file
        self._start: bytes | None = None  # snapshot of a new job, written with its first event
        self._left_out = False  # whether lines were left out since the last snapshot
        self._tried = 0.0  # monotonic time of the last snapshot

    @guarded
    def began(self, job: Job) -> None:
        self._start = snapshot(job)

    @guarded
    def handled(self, job: Job, event: Event, outcome: Outcome) -> None:
        commits = [note["commit"] for note in outcome.notes if note["event"] == "committed"]
        # After the run's last checkpoint no event follows that could be repeated from a snapshot.
        saves = any(commit.savers and not commit.last for commit in commits)
        if saves or self._bytes > MOST_BYTES:
            self._snapshot(snapshot(job), replace=True)
            return
        if self._start is not None:
            self._snapshot(self._start, replace=False)
        elif self._left_out and self._later.idle and time.monotonic() > self._tried + AGAIN_SECONDS:
            self._snapshot(snapshot(job), replace=False)
            return
        if not self._left_out and not self._later(self._write_event, time.time(), event, outcome):
            self._left_out = True

    async def flushed(self, seconds: float) -> None:
        await self._later.flushed(seconds)

    def _snapshot(self, data: bytes, replace: bool) -> None:
        """Queues a snapshot. replace: whether it replaces the content of the file."""
        self._start = None
        # Reset the size here: otherwise every event would cause a snapshot until the thread runs.
        self._bytes = 0 if replace else self._bytes
        self._tried = time.monotonic()
        self._left_out = False
        if not self._later(self._write_snapshot, time.time(), data, replace):
            self._left_out = True

    # -- in the thread -----------------------------------------------------------------------------------------

    @guarded
    def _write_event(self, at: float, event: Event, outcome: Outcome) -> None:
        self._write(at, b'"event":%s,"outcome":"%s"' % (encode(event), fingerprint(outcome).encode()))

    @guarded
    def _write_snapshot(self, at: float, data: bytes, replace: bool) -> None:
        if replace:
            self._close()
        self._write(at, b'"snapshot":"%s"' % b64encode(data), os.O_TRUNC if replace else 0)

    def _write(self, at: float, fields: bytes, mode: int = 0) -> None:
        line = b'{"time":%.6f,"term":%d,%s}\n' % (at, self._term(), fields)
        try:
            if self._file < 0:
                self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | mode, 0o666)
                self._bytes = os.fstat(self._file).st_size
            written = os.write(self._file, line)
            self._bytes += written
            if written < len(line):
                os.write(self._file, b"\n")  # the reader skips the torn line
                self._left_out = True
        except OSError as error:
            warn_once(f"{self._path} cannot be written: {error.strerror}")
            self._left_out = True

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
