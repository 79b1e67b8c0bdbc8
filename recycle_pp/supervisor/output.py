"""A worker's standard output and error: a pipe that a thread of the supervisor copies to the worker's log.

    output = Output(log)
    os.dup2(output.descriptor, 1)          # in the child
    output.copy()                          # in the parent, after the fork
    output.since(received)                 # the output after the first `received` bytes, from memory
    output.close()                         # after the worker's death

If a worker wrote to the log itself, a slow disk would block every `print` and every library's warning.
"""

from __future__ import annotations

import fcntl
import os
import threading
from contextlib import suppress

from recycle_pp.telemetry.log_file import LogFile

KEPT = 1 << 16  # newest bytes kept in memory, for stack traces and the last line
PIPE = 1 << 20  # bytes that a worker may write while the supervisor is suspended
CLOSE_SECONDS = 0.5  # time for the last lines; a process that cannot be killed keeps its end of the pipe open


class Output:
    """The pipe for one worker's output.

    descriptor  the worker's end of the pipe; `copy` closes it in this process
    received    number of bytes that have arrived so far
    """

    def __init__(self, log: LogFile) -> None:
        self.received = 0
        self._log = log
        self._kept = b""
        self._ours, self.descriptor = os.pipe()
        with suppress(OSError):  # PIPE is above this user's limit
            fcntl.fcntl(self._ours, fcntl.F_SETPIPE_SZ, PIPE)
        self._thread = threading.Thread(target=self._copy, name="output", daemon=True)

    def copy(self) -> None:
        os.close(self.descriptor)
        self._thread.start()

    def since(self, received: int) -> bytes:
        """The output after the first `received` bytes, at most its newest `KEPT` bytes."""
        kept = self._kept
        count = self.received - received
        return kept[-count:] if count > 0 else b""

    def last_line(self) -> str:
        lines = self._kept.decode(errors="replace").rstrip().splitlines()
        return lines[-1] if lines else ""

    def close(self) -> None:
        """Waits until all output is copied, at most `CLOSE_SECONDS`. Call it after the worker's death."""
        self._thread.join(CLOSE_SECONDS)

    def _copy(self) -> None:
        while chunk := os.read(self._ours, KEPT):
            self._kept = (self._kept + chunk)[-KEPT:]
            self.received += len(chunk)
            self._log.write(chunk)
        os.close(self._ours)
