"""A .jsonl file that only grows, apart from `cut`.

    metrics = Lines(run.metrics, later, term)
    metrics.write({"step": 20, "loss": 2.31, ...})
    metrics.cut(20)                 # steps 20 and later are undone
    metrics.close()

Each line is written by one system call, so a killed process leaves no partial line. With `later`, a thread of the
coordinator writes: if the coordinator dies, the lines of the last milliseconds may be lost, more on a slow disk.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .background import Later, now
from .undone import cut
from .warn import warn, warn_once
from .words import plural

KEPT = 10_000  # lines


class Lines:
    """Writes one JSON object per line. NaN and infinity, which JSON lacks, become null.

    Each line ends with `term`: the writer's term when the line goes to the disk (`wire.terms`).

    While the disk rejects lines (it is full, or read-only), the newest KEPT of them wait for the next `write` or
    `retry`. One warning reports the error, a later one the number of lost lines.
    """

    def __init__(self, path: Path, later: Later = now, term: Callable[[], int] = lambda: 0):
        """
        later: calls each function that touches the file, in order; in another thread if the caller must not wait
        term:  the writer's current term
        """
        self._path = path
        self._file = -1
        self._later = later
        self._term = term
        self._refused: deque[tuple[int, bytes]] = deque(maxlen=KEPT)  # step, record
        self._torn = False  # the last line is incomplete
        self._kept = -1  # newest step that the last cut has kept
        self._lost = 0  # lost lines that are not reported yet
        later(self._write)

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends a record with the key `step`, unless a cut has kept a line of this step."""
        if not self._later(self._append, record["step"], json.dumps(_finite(record), separators=(",", ":")).encode()):
            self._lost += 1

    def retry(self) -> None:
        """Retries the lines that the disk has rejected."""
        if self._refused:
            self._later(self._write)

    def cut(self, steps: int) -> None:
        """Keeps the lines of the first `steps` steps and removes the others written so far."""
        self._later(self._cut, steps)

    def close(self) -> None:
        self._later(self._close)

    def _append(self, step: int, record: bytes) -> None:
        if step > self._kept:
            self._lost += len(self._refused) == KEPT
            self._refused.append((step, record))
            self._write()

    def _write(self) -> None:
        """Creates the file and writes the lines that wait."""
        try:
            if self._file < 0:
                self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
                self._torn = _ends_torn(self._file)
            while self._refused:
                line = self._refused[0][1][:-1] + b',"term":%d}\n' % self._term()
                self._torn = os.write(self._file, b"\n" * self._torn + line) < len(line)
                if self._torn:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._refused.popleft()
            if self._lost:
                lost = self._lost
                self._lost = 0
                warn(f"{self._path} lacks {plural(lost, 'line')}: the disk rejected them")
        except OSError as error:
            warn_once(f"{self._path} cannot be written: {error.strerror}")

    def _cut(self, steps: int) -> None:
        self._refused = deque((record for record in self._refused if record[0] < steps), KEPT)
        self._close()
        self._kept = -1
        try:
            self._kept = cut(self._path, steps)
        except OSError as error:
            warn_once(f"undone steps could not be removed from {self._path}: {error.strerror}")

    def _close(self) -> None:
        self._write()
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def _ends_torn(file: int) -> bool:
    """Whether the last line is incomplete: the disk of an earlier coordinator was full."""
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
