"""The monotonic clocks of other machines, read as this machine's: spans of different nodes fit into one trace.

    clocks.heard(worker, heartbeat["boot"], heartbeat["now"], time.monotonic())
    here = clocks.here(worker, there)          # seconds

Processes of one machine share its clock exactly; they know each other by the kernel's boot id. Of another machine the
offset is the least that (arrival - sending) of its last heartbeats showed: right up to the shortest delay of a message
between the two. Only the last ones count, since clocks drift apart by some 10 ms an hour.
"""

from __future__ import annotations

from collections import deque

from recycle_pp.linux.processes import boot_id

KEPT = 60  # heartbeats


class Clocks:
    def __init__(self) -> None:
        self._boot = boot_id()
        self._offsets: dict[object, deque[float]] = {}

    def heard(self, worker: object, boot: str, now: float, arrived: float) -> None:
        """A heartbeat: its sender's machine and clock (seconds), and when it arrived here."""
        if boot == self._boot:
            self._offsets.pop(worker, None)
        else:
            self._offsets.setdefault(worker, deque(maxlen=KEPT)).append(arrived - now)

    def here(self, worker: object, there: float) -> float:
        """A time of the worker's machine on this one's clock."""
        return there + min(self._offsets.get(worker, (0.0,)))
