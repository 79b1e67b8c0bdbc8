"""The times of all ops that the workers ran, on the clock of this process.

    spans = SpanTables()
    spans.heartbeat(worker, message)            # updates the offset of the worker's clock
    spans.add(worker, measured)                 # all ops that the worker ran in a step
    spans.of(step)                              # {worker: table}, as `packing.unpack` returns it
    spans.local(worker, seconds)                # converts a time of the worker's clock
    spans.drop(step)                            # forgets this step and all before it

The coordinator owns the tables and plans with them; telemetry writes traces from them.
"""

from __future__ import annotations

import time

import numpy as np
from recycle_schedules import Worker

from recycle_pp.wire.messages.lifecycle import WorkerHeartbeat
from recycle_pp.wire.messages.steps import Measured

from .clocks import Clocks
from .packing import unpack


class SpanTables:
    def __init__(self) -> None:
        self._clocks = Clocks()
        self._packed: dict[int, dict[Worker, tuple[bytes, float]]] = {}  # and the offset of the worker's clock
        self._tables: dict[int, dict[Worker, np.ndarray]] = {}

    def heartbeat(self, worker: Worker, message: WorkerHeartbeat) -> None:
        self._clocks.observe(worker, message.boot, message.now, time.monotonic())

    def local(self, worker: Worker, seconds: float) -> float:
        return self._clocks.local(worker, seconds)

    def add(self, worker: Worker, message: Measured) -> None:
        """Adds the worker's spans of a step, in place of those of an earlier attempt at this step."""
        self._packed.setdefault(message.step, {})[worker] = message.spans, self._clocks.local(worker, 0.0)
        self._tables.get(message.step, {}).pop(worker, None)

    def of(self, step: int) -> dict[Worker, np.ndarray]:
        """The tables of all workers whose spans of this step have arrived."""
        packed = self._packed.get(step, {})
        tables = self._tables.setdefault(step, {})
        if len(tables) < len(packed):
            tables |= {w: unpack(data, clock) for w, (data, clock) in packed.items() if w not in tables}
        return tables

    def has(self, step: int, worker: Worker) -> bool:
        return worker in self._packed.get(step, {})

    def drop(self, step: int) -> None:
        for kept in (self._packed, self._tables):
            for old in [known for known in kept if known <= step]:
                del kept[old]

    def clear(self) -> None:
        """Forgets all steps, before the workers restart from a checkpoint."""
        self._packed.clear()
        self._tables.clear()
