"""Decides when to start a rank's standby process (`run.standby`).

    standby = Standby(launch, settings)
    if standby.due(signs): monitor.start_standby(settings)        # at every heartbeat

The replacement of a killed worker has to import torch, read its data, join the job and receive the state. A standby
process imports and reads in advance. The first one starts after the worker's first step, so that it delays no worker's
start. It is forked from a server that imports torch once for all of them. The ranks of a machine take turns. Later
standby processes start without waiting for a turn, after the first step of the new worker.
"""

from __future__ import annotations

import sys

from recycle_pp.config.settings import Settings
from recycle_pp.linux.memory import free_memory
from recycle_pp.wire.launch import Launch
from recycle_pp.wire.messages.supervisors import Signs

FREE = 400_000_000  # free bytes that run.standby=auto requires for each worker on this machine
BEATS = 4  # heartbeats between the turns of two ranks: importing torch keeps a core busy for two seconds


class Standby:
    def __init__(self, launch: Launch, settings: Settings) -> None:
        self._launch = launch
        self._wanted = settings.run.standby
        self._incarnation = self._step = -1
        self._beats = 0  # heartbeats since the first step of this incarnation
        self._turn = 1 + BEATS * launch.local_rank  # staggered, because all ranks finish their first step together

    def due(self, signs: Signs | None) -> bool:
        """Whether to start the standby process now. signs: vital signs of the worker at this heartbeat."""
        if self._wanted == "off" or signs is None or signs.activity.step < 0 or "torch" in sys.modules:
            return False  # a supervisor that has imported torch (in tests) forks its workers, so they import nothing
        if signs.incarnation != self._incarnation:
            if self._incarnation >= 0:
                self._turn = 1  # without waiting for a turn, because the new worker may die soon too
            self._incarnation = signs.incarnation
            self._step = signs.activity.step
            self._beats = 0
        self._beats += signs.activity.step > self._step
        if self._beats != self._turn:
            return False
        if self._wanted == "on":
            return True
        free = free_memory()
        return free is None or free >= FREE * self._launch.local_world
