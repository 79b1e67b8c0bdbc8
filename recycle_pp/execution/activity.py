"""Publishes the current activity of this worker's main thread to its supervisor and to the coordinator.

    doing = Doing(Board(lifeline.memory))
    doing.works(kind, step, (1, 3))                         # the main thread only
    doing.waits("tensor", step, (1, 3), peer, pending.arrived)
    doing.on_device("F", step, (1, 3))                      # before a wait for the device to finish this op
    doing.delivered()                # any thread: serial number of the current wait if it can end now, else None
    doing.lacks()                    # any thread: members whose messages the current wait lacks, if that is known

Each activity is written to the board before it begins. A write takes 2 us. The first activity is the start of the
worker.
"""

from __future__ import annotations

from collections.abc import Callable

from recycle_schedules import KINDS, MicroBatch, Worker

from recycle_pp.supervisor.vital_signs import Board
from recycle_pp.wire.messages.activity import VALIDATION, Activity
from recycle_pp.wire.messages.members import Member

Arrived = Callable[[], bool]
Lacks = Callable[[], list[Member]]
COMPILED = frozenset((*KINDS, VALIDATION))  # ops whose first run may compile kernels


class Doing:
    def __init__(self, board: Board | None = None) -> None:
        self._board = board or Board(bytearray(4096))
        self._number = 0
        self._now = Activity()
        self._done: set[str] = set()  # kinds of ops that have run before, so their kernels are compiled
        self._awaited: tuple[int, Arrived, Lacks] | None = None  # replaced as a whole, because other threads read it

    def starts(self, what: str) -> None:
        """Records the start of a startup phase. `Activity.what` lists the phases."""
        self._set(Activity("starts", what))

    def works(self, what: str, step: int, microbatch: MicroBatch | None = None) -> None:
        self._awaited = None
        self._set(Activity("works", what, step, microbatch, None, what in COMPILED and what not in self._done))

    def waits(
        self,
        what: str,
        step: int = -1,
        microbatch: MicroBatch | None = None,
        peer: Worker | None = None,
        arrived: Arrived = lambda: False,
        lacks: Lacks = list,
    ) -> None:
        """Records the start of a wait. Other threads call both functions.

        arrived  whether the wait can end, for instance because its message has arrived
        lacks    members whose messages have not arrived
        """
        self._awaited = (self._number + 1, arrived, lacks)
        self._set(Activity("waits", what, step, microbatch, peer))

    def on_device(self, what: str, step: int, microbatch: MicroBatch) -> None:
        self._awaited = None
        self._set(Activity("device", what, step, microbatch, None, what in COMPILED and what not in self._done))

    def delivered(self) -> int | None:
        awaited = self._awaited
        return awaited[0] if awaited is not None and awaited[1]() else None

    def lacks(self) -> list[Member]:
        awaited = self._awaited
        return awaited[2]() if awaited is not None else []

    def _set(self, activity: Activity) -> None:
        before, self._now = self._now, activity
        self._number += 1
        self._board.write(self._number, activity)
        if activity.kind != "device":
            self._done.add(before.what)
