"""What the workers measured of their ops, on the clock of this process.

    spans = SpanTables()
    spans.heard(worker, heartbeat)              # heartbeats tell the offset of a worker's clock
    spans.add(worker, measured)                 # every op that the worker ran in a step
    spans.of(step)                              # {worker: table}, as `packing.unpack` returns it
    spans.here(worker, seconds)                 # a time of the worker's clock
    spans.drop(step)                            # that step and all before it

The coordinator owns the tables and plans with them; traces are written from the same ones.
"""

from __future__ import annotations

import time

import numpy as np
from recycle_schedules import Worker

from recycle_pp.wire.messages.workers import Measured, WorkerHeartbeat

from .clocks import Clocks
from .guard import guarded, guarded_returning
from .packing import unpack


class SpanTables:
    def __init__(self) -> None:
        self._clocks = Clocks()
        self._packed: dict[int, dict[Worker, tuple[bytes, float]]] = {}  # with the offset of the worker's clock
        self._tables: dict[int, dict[Worker, np.ndarray]] = {}

    @guarded
    def heard(self, worker: Worker, message: WorkerHeartbeat) -> None:
        self._clocks.heard(worker, message.boot, message.now, time.monotonic())

    def here(self, worker: Worker, seconds: float) -> float:
        return self._clocks.here(worker, seconds)

    @guarded
    def add(self, worker: Worker, message: Measured) -> None:
        """Replaces what the worker measured in an earlier attempt at the step."""
        self._packed.setdefault(message.step, {})[worker] = message.spans, self._clocks.here(worker, 0.0)
        self._tables.get(message.step, {}).pop(worker, None)

    @guarded_returning(dict[Worker, np.ndarray])
    def of(self, step: int) -> dict[Worker, np.ndarray]:
        """The tables of all workers that have sent theirs; empty if none has."""
        packed, tables = self._packed.get(step, {}), self._tables.setdefault(step, {})
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
        """All steps, before the workers restart from a checkpoint."""
        self._packed.clear()
        self._tables.clear()
