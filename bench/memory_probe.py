"""Writes memory, bytes sent and CPU time to a file after each step, in every process of a job of `bench/memory.py`.

`rss` is the kernel's peak (VmHWM). With RECYCLE_PROBE=allocator every tensor of 64 KiB or more has its own pages, which
are released when the tensor is freed (mallopt, M_MMAP_THRESHOLD). So `allocated` excludes free blocks that glibc keeps.
It is the peak minus the pages of files and the level before the stage was built.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from recycle_pp.comm.tcp import connection
from recycle_pp.execution import loading
from recycle_pp.execution.commits import Commits
from recycle_pp.linux.processes import memory_of

M_MMAP_THRESHOLD, OWN_PAGES = -3, 64 << 10

_lock = threading.Lock()
_sent = 0
_before = 0
_records: list[dict[str, Any]] = []


def _probed_stage(settings: Any, stage: int, *arguments: Any) -> Any:
    global _before
    if os.environ.get("RECYCLE_PROBE") == "allocator":
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, OWN_PAGES)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    _before = memory_of("RssAnon")
    return _stage(settings, stage, *arguments)


def _probed_send(self: Any, tensor: Any, *arguments: Any) -> Any:
    global _sent
    with _lock:
        _sent += tensor.nbytes
    return _send(self, tensor, *arguments)


def _probed_settle(self: Any, *arguments: Any) -> None:
    _settle(self, *arguments)
    committed = self._session.participant.committed
    if committed >= len(_records):
        rss = memory_of("VmHWM")
        allocated = rss - memory_of("RssFile") - _before
        _records.append({"rss": rss, "allocated": allocated, "sent": _sent, "cpu": time.process_time()})
        who = self._session.participant.worker
        path = Path(os.environ["RECYCLE_PROBE_FOLDER"]) / f"{who.pipeline}.{who.stage}.json"
        path.write_text(json.dumps(_records))


_loading: Any = loading
_stage, _loading._stage = _loading._stage, _probed_stage
_connections: Any = connection.Connection
_send, _connections.send = _connections.send, _probed_send
_commits: Any = Commits
_settle, _commits.settle = _commits.settle, _probed_settle
