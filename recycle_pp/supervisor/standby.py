"""When a rank's next worker process may be started ahead: `run.standby`.

    standby = Standby(launch, settings)
    if standby.due(signs): monitor.stand_by(settings)        # at every heartbeat

A worker that is killed is back when its successor has imported torch, found its place and got the state; the first of
these takes seconds, and needs nothing of the job. So a second process imports ahead and waits: after the worker's first
step, when importing delays nobody's start, at first one rank of a machine after the other, later at once.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

from recycle_pp.config.settings import Settings
from recycle_pp.wire.launch import Launch
from recycle_pp.wire.messages.supervisors import Signs

FREE = 400_000_000  # bytes of memory a worker of this machine that must be free for run.standby=auto
BEATS = 4  # heartbeats between two ranks: importing torch keeps a core busy for two seconds


class Standby:
    def __init__(self, launch: Launch, settings: Settings) -> None:
        self._launch, self._wanted = launch, settings.run.standby
        self._incarnation = self._step = -1
        self._beats = 0  # since the first step of this incarnation was done
        self._turn = 1 + BEATS * launch.local_rank  # at the start all ranks are due at once: one after the other

    def due(self, signs: Signs | None) -> bool:
        """signs: of the worker at this heartbeat."""
        if self._wanted == "off" or signs is None or signs.activity.step < 0 or "torch" in sys.modules:
            return False  # who is forked from a process that has torch imports nothing
        if signs.incarnation != self._incarnation:
            if self._incarnation >= 0:
                self._turn = 1  # the one who stood by has taken its place: the next death may be near
            self._incarnation, self._step, self._beats = signs.incarnation, signs.activity.step, 0
        self._beats += signs.activity.step > self._step
        if self._beats != self._turn:
            return False
        return self._wanted == "on" or free_memory() >= FREE * self._launch.local_world


def free_memory() -> float:
    """Bytes that this machine, or this container, can still give; infinite where it does not say."""
    found = [float("inf")]
    with suppress(OSError, ValueError, IndexError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) * 1024.0)
    with suppress(OSError, ValueError):
        limit = float(Path("/sys/fs/cgroup/memory.max").read_text())
        found.append(limit - float(Path("/sys/fs/cgroup/memory.current").read_text()))
    return min(found)
