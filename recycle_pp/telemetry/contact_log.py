"""Writes receipts/supervisor-3.jsonl: how the supervisor of rank 3 lost its coordinators, for readers of the folder.

    contact = ContactLog(run, rank=3)
    contact.write("lost", "rank 0 at 10.0.0.1:29501")     # or "follows", "gave_up"; never blocks
    contact.flush()                                       # blocks for up to a second

The file is written only once a coordinator is lost. Each supervisor has its own file, so a supervisor that is cut off
from the job can still write its account. `wire.records.Contact` defines the fields.
"""

from __future__ import annotations

import json
import os
import socket
import time

from .log_file import LogFile
from .run_folder import RunFolder

FLUSH_SECONDS = 1.0


class ContactLog:
    def __init__(self, run: RunFolder, rank: int) -> None:
        self._file = LogFile(run.contact(rank))
        self._about = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid()}

    def write(self, what: str, detail: str) -> None:
        line = {"time": time.time(), **self._about, "what": what, "detail": detail}
        self._file.write(json.dumps(line).encode() + b"\n")

    def flush(self) -> None:
        self._file.flush(FLUSH_SECONDS)
