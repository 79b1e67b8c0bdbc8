"""Converts times of other machines' monotonic clocks to this machine's clock, so that one trace can contain all spans.

    clocks.observe(worker, heartbeat["boot"], heartbeat["now"], time.monotonic())
    here = clocks.local(worker, there)          # seconds

Processes with the same kernel boot id share a clock. For another machine, each heartbeat gives the difference between
its arrival time on this clock and its sending time on the other clock. The smallest difference is the offset. Its error
is the shortest message delay between the two machines. Only recent heartbeats count, because clocks drift by about
10 ms an hour.
"""

from __future__ import annotations

from collections import deque

from recycle_pp.linux.processes import boot_id

KEPT = 60  # number of recent heartbeats that count


class Clocks:
    def __init__(self) -> None:
        self._boot = boot_id()
        self._offsets: dict[object, tuple[str, deque[float]]] = {}  # by worker: boot id of its machine, newest offsets

    def observe(self, worker: object, boot: str, now: float, arrived: float) -> None:
        """Updates the offset of the worker's clock from a heartbeat.

        boot:    boot id of the sender's machine
        now:     time of sending, in seconds of the sender's clock
        arrived: time of arrival, in seconds of this machine's clock
        """
        if boot == self._boot:
            self._offsets.pop(worker, None)
        else:
            known, offsets = self._offsets.get(worker, ("", deque[float]()))
            if boot != known:  # the worker runs on another machine now, whose clock may differ by days
                offsets = deque(maxlen=KEPT)
            offsets.append(arrived - now)
            self._offsets[worker] = boot, offsets

    def local(self, worker: object, there: float) -> float:
        """Converts a time of the worker's clock to seconds of this machine's clock."""
        return there + min(self._offsets[worker][1] if worker in self._offsets else (0.0,))
