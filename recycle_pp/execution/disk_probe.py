"""A thread that probes the disks of the training data, so that the coordinator can distinguish one failed disk from a
failure of all.

    probe_disks(read_limit(suspicion))       # once per process; the thread never ends

A worker that waits for another one does not read. Without probes, the state of its disk would be unknown.
"""

from __future__ import annotations

import threading
import time

from recycle_pp.data.file_tokens import probe


def probe_disks(seconds: float) -> None:
    """Starts the thread. seconds: interval between probes. `slowest_read` reports a probe that blocks."""

    def repeat() -> None:
        while True:
            probe()
            time.sleep(seconds)

    threading.Thread(target=repeat, name="disk probe", daemon=True).start()
