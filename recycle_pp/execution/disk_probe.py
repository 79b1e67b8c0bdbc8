"""Probes the disks of the training data in a thread. So the coordinator can distinguish the failure of one disk from a
failure of all disks.

    probe_disks(read_limit(suspicion))       # once per process; the thread never ends

A worker that waits for a peer does not read, so without probes the state of its disk would be unknown.
"""

from __future__ import annotations

import threading
import time

from recycle_pp.data.file_tokens import probe


def probe_disks(seconds: float) -> None:
    """Starts a thread that probes the disks every `seconds`. `slowest_read` reports a probe that is blocked."""

    def repeat() -> None:
        while True:
            probe()
            time.sleep(seconds)

    threading.Thread(target=repeat, name="disk probe", daemon=True).start()
