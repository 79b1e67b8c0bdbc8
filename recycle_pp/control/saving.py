"""Checkpoints, as the coordinator sees them: who saves, when all parts are there, who puts them together.

    saving.begin(step, savers)              # with the commit; one live worker a stage writes its part
    out = saving.saved(worker, message)     # when the last part is written: one worker assembles the checkpoint
    out = saving.died(worker, live)         # a saver died: at the end of the run a peer takes over, else it is given up

A checkpoint is named by the steps it contains: `step-000020` holds the state after steps 0 to 19.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from recycle_schedules import Worker

from ..protocol.job import Send
from .messages import Message


class Saving:
    def __init__(self, folder: Path, stages: int) -> None:
        self._folder, self._stages = folder, stages
        self._step = -1  # of the save that is under way
        self._missing: dict[int, Worker] = {}  # stage -> who writes it
        self._assembler: Worker | None = None
        self._final = False

    @property
    def busy(self) -> bool:
        return bool(self._missing) or self._assembler is not None

    def steps_done(self) -> int:
        """Of the newest finished checkpoint; 0 without one."""
        found = [p for p in self._folder.glob("step-*") if p.suffix != ".tmp" and (p / ".metadata").exists()]
        return max((int(p.name.removeprefix("step-")) for p in found), default=0)

    def begin(self, step: int, savers: Collection[Worker], final: bool) -> None:
        """`step`: steps done. A save that is still under way is given up: the newer one is worth more."""
        self._step, self._final, self._assembler = step, final, None
        self._missing = {w.stage: w for w in savers}

    def abandon(self) -> None:
        self._missing, self._assembler = {}, None

    def saved(self, worker: Worker, message: Message) -> list[Send]:
        if message["step"] != self._step or self._missing.get(worker.stage) != worker:
            return []
        del self._missing[worker.stage]
        return [] if self._missing else self._assemble(worker)

    def assembled(self, message: Message) -> None:
        if message["step"] == self._step:
            self._assembler = None

    def died(self, worker: Worker, live: Collection[Worker]) -> list[Send]:
        if worker not in (*self._missing.values(), self._assembler):
            return []
        if not self._final:
            self.abandon()
            return []
        peers = sorted(w for w in live if w.stage == worker.stage)
        if self._assembler == worker:
            return self._assemble(min(live))
        self._missing[worker.stage] = peers[0]
        return [Send(peers[0], {"type": "save", "step": self._step})]

    def _assemble(self, worker: Worker) -> list[Send]:
        self._assembler = worker
        return [Send(worker, {"type": "assemble", "step": self._step})]
