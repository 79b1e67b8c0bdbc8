"""Stores the spans (start and end) of all ops that the workers ran, in times of this process's clock.

    spans = SpanTables()
    spans.heartbeat(worker, message)            # updates the offset of the worker's clock
    spans.add(worker, measured)                 # the spans of the worker's ops in a step
    spans.of(step)                              # {worker: table}, with tables as `packing.unpack` returns them
    spans.local(worker, seconds)                # converts a time of the worker's clock
    spans.drop(step)                            # drops this step and all earlier steps

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
        # step -> worker -> (packed spans, offset of the worker's clock in seconds)
        self._packed: dict[int, dict[Worker, tuple[bytes, float]]] = {}
        self._tables: dict[int, dict[Worker, np.ndarray]] = {}

    def heartbeat(self, worker: Worker, message: WorkerHeartbeat) -> None:
        self._clocks.observe(worker, message.boot, message.now, time.monotonic())

    def local(self, worker: Worker, seconds: float) -> float:
        return self._clocks.local(worker, seconds)

    def add(self, worker: Worker, message: Measured) -> None:
        """Adds the worker's spans of a step. Replaces its spans of an earlier attempt at this step."""
        self._packed.setdefault(message.step, {})[worker] = message.spans, self._clocks.local(worker, 0.0)
        self._tables.get(message.step, {}).pop(worker, None)

    def of(self, step: int) -> dict[Worker, np.ndarray]:
        """Worker -> table, for all workers whose spans of this step have arrived."""
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
        """Drops all steps, before the workers restart from a checkpoint."""
        self._packed.clear()
        self._tables.clear()
