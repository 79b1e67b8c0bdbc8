"""A .jsonl file that only grows, apart from `cut`.

    metrics = Lines(run.metrics, later, term, unwritten)
    metrics.restore(kept)           # on the next coordinator: the lines that the lost one could not write
    metrics.write({"step": 20, "loss": 2.31, ...})
    metrics.cut(20)                 # steps 20 and later are rolled back
    metrics.close()

Each line is written by one system call, so a killed process leaves no partial line. If `later` is a `Background`, its
thread writes. If lines wait for a long time, `unwritten` shares them with the other supervisors.
"""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from .background import Later, now
from .run_folder import ONE_LINE_A_STEP
from .undone import cut, renew
from .unwritten import Unwritten
from .warn import warn, warn_once
from .words import plural


class Lines:
    """Writes one JSON object per line. NaN and infinity, which JSON lacks, become null.

    Each line ends with `term`: the writer's term when the line goes to the disk (`wire.terms`).

    Lines that a full or read-only disk rejects wait in `unwritten` for the next `write` or `retry`. One warning reports
    the error, and a later one reports how many lines `unwritten` has dropped.
    """

    def __init__(
        self,
        path: Path,
        later: Later = now,
        term: Callable[[], int] = lambda: 0,
        unwritten: Unwritten | None = None,
    ):
        """
        later: calls each function that touches the file, in order; in another thread if the caller must not block
        term:  returns the writer's current term
        unwritten: shared by the files of a folder; None: only for this file
        """
        self._path = path
        self._file = -1
        self._later = later
        self._term = term
        self._unwritten = unwritten or Unwritten()
        self._one_a_step = path.name in ONE_LINE_A_STEP
        self._torn = False  # whether the last line is incomplete
        self._newest = -1  # newest step in the file, as far as this coordinator has read or written it
        self._continues = False  # whether a lost coordinator may have written some of the waiting lines
        later(self._create)

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends a record with the key `step`. In a file with one line per step, skips a step that has a line."""
        self._add(record["step"], json.dumps(_finite(record), separators=(",", ":")).encode())

    def restore(self, kept: Unwritten) -> None:
        """Appends the lines that this process keeps for a lost coordinator. Skips lines that are already in the file.
        Call it before the first `write`."""
        self._continues = True
        self._unwritten.adopt(kept, self._path.name)
        self._later(self._write)

    def retry(self) -> None:
        """Retries the lines that the disk has rejected."""
        if self._unwritten.oldest(self._path.name) is not None:
            self._later(self._write)

    def cut(self, steps: int) -> None:
        """Keeps the lines of the first `steps` steps and removes the others written so far."""
        self._add(steps, b"")

    def close(self) -> None:
        self._later(self._close)

    def _add(self, step: int, record: bytes) -> None:
        number = self._unwritten.add(self._path.name, step, record)
        self._later(self._write, number)  # if the queue is full, a later call writes it
        self._unwritten.look()

    # -- in the thread -------------------------------------------------------------------------------------------

    def _create(self) -> None:
        try:
            self._open()
        except OSError as error:
            warn_once(f"{self._path} cannot be written: {error.strerror}")

    def _write(self, newest: float = math.inf) -> None:
        """Writes the waiting lines up to number `newest`."""
        try:
            if self._continues:
                self._find_written()
            while (line := self._unwritten.oldest(self._path.name)) is not None and line.number <= newest:
                if not line.record:
                    self._cut(line.step)
                elif line.step > self._newest or not self._one_a_step:
                    self._append(line.record)
                    self._newest = line.step
                self._unwritten.remove(line)
            if lost := self._unwritten.dropped(self._path.name):
                warn(f"{self._path} lacks {plural(lost, 'line')}: the disk rejected them")
        except OSError as error:
            warn_once(f"{self._path} cannot be written: {error.strerror}")

    def _open(self) -> None:
        if self._file < 0:
            self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
            self._torn = _ends_torn(self._file)

    def _append(self, record: bytes) -> None:
        self._open()
        line = record[:-1] + b',"term":%d}\n' % self._term()
        self._torn = os.write(self._file, b"\n" * self._torn + line) < len(line)
        if self._torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _find_written(self) -> None:
        """Finds out which of the waiting lines the lost coordinator has already written, so that they are not repeated.

        In a file with one line per step, these are the lines up to the newest step in the file. Events are compared by
        content, because a step can have many. Their file is first replaced by a copy, because the lost coordinator may
        still be alive: it can then append only to the old file."""
        self._release()
        if self._one_a_step:
            self._newest = cut(self._path, sys.maxsize)
        else:
            renew(self._path)
            waiting = {line.record: line for line in self._unwritten.lines(self._path.name)}
            with suppress(FileNotFoundError), self._path.open("rb") as file:
                for text in file:
                    if (line := waiting.get(text.rpartition(b',"term":')[0] + b"}")) is not None:
                        self._unwritten.remove(line)
        self._continues = False

    def _cut(self, steps: int) -> None:
        self._release()
        self._newest = -1
        try:
            self._newest = cut(self._path, steps)
        except OSError as error:
            warn_once(f"rolled-back steps could not be removed from {self._path}: {error.strerror}")

    def _close(self) -> None:
        self._write()
        self._release()

    def _release(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def _ends_torn(file: int) -> bool:
    """Whether the last line is incomplete, because an earlier coordinator's disk was full."""
    size = os.fstat(file).st_size
    return size > 0 and os.pread(file, 1, size - 1) != b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
