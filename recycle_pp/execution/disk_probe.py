"""A thread that tries the disks of the training data, so that the coordinator can tell one dead disk from all.

    probe_disks(read_limit(suspicion))       # once a process; the thread never ends

A worker that waits for another one reads nothing. Without a try of its own, nobody would know whether its disk answers.
"""

from __future__ import annotations

import threading
import time

from recycle_pp.data.file_tokens import probe


def probe_disks(seconds: float) -> None:
    """seconds: between two probes. A probe blocks as long as the disk does, and `slowest_read` reports it meanwhile."""

    def repeat() -> None:
        while True:
            probe()
            time.sleep(seconds)

    threading.Thread(target=repeat, name="disk probe", daemon=True).start()
