"""Checkpoints on the coordinator: which workers save, and which one assembles the parts.

    saving.begin(step, savers, final, live) # with the commit: the savers write the parts of their stages
    out = saving.saved(worker, message)     # after the last part, one worker assembles the checkpoint,
    out = saving.compared(worker, message)  # once the digests of all live workers have arrived and agree
    out = saving.died(worker, live)         # the run's last checkpoint replaces a dead saver, any other is abandoned
    out = saving.only(live)                 # all awaited workers that are not in `live` have died
    out = saving.returned(worker)           # the worker's connection was reset: repeats a request that may be lost

The name of a checkpoint is its number of steps: `step-000020` has the state after steps 0 to 19.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from recycle_schedules import Worker

from recycle_pp.protocol.events import Send
from recycle_pp.state.checksum import damage
from recycle_pp.telemetry.background import in_thread
from recycle_pp.telemetry.checkpoint_folders import finished, name
from recycle_pp.telemetry.words import plural
from recycle_pp.wire.messages.saving import Assemble, Assembled, Assembling, Digests, Save, Saved, SaveFailed

from .replicas import Replicas


class CannotRestore(RuntimeError):
    """Workers cannot restart from a checkpoint. The message has the reason. step: steps in the newest intact
    checkpoint."""

    def __init__(self, reason: str, step: int) -> None:
        super().__init__(reason)
        self.step = step


class Whole(NamedTuple):
    """
    step     steps in the newest intact checkpoint; 0 without one
    damaged  steps in a newer checkpoint -> its damage
    """

    step: int = 0
    damaged: Mapping[int, str] = MappingProxyType({})


NOTHING = Whole()


def newest_whole(folder: Path) -> Whole:
    """The newest intact checkpoint. Reads every byte of it and of newer, damaged checkpoints. May block for minutes."""
    damaged: dict[int, str] = {}
    for step, path in reversed(finished(folder).items()):
        wrong = damage(path, step)
        if wrong is None:
            return Whole(step, damaged)
        damaged[step] = wrong
    return Whole(0, damaged)


class Saving:
    """
    step   steps in the checkpoint that is being saved, or was saved last
    final  whether this is the last checkpoint of the run
    """

    def __init__(self, folder: Path, newest: int = 0) -> None:
        """newest: steps in the newest known checkpoint."""
        self._folder = folder
        self._newest = newest
        self._newest_since = time.monotonic()
        self.step = -1
        self._missing: dict[object, Worker] = {}  # stage (if sharded: worker) -> writer of a part
        self._parts: dict[Worker, str] = {}  # finished parts, by writer
        self._writing: set[Worker] = set()  # workers whose part of any checkpoint is not finished
        self._whole: set[Worker] = set()  # workers asked to save every unit they hold, because a peer died
        self._last: Worker | None = None  # writer of the last part; assembles after the comparison
        self.replicas = Replicas()
        self._assembler: Worker | None = None
        self._assembles = False  # the assembler has received its request
        self.final = self._sharded = False
        self._restored = -1  # steps in the checkpoint restored last
        self.failed = False  # the last checkpoint of the run could not be written

    @property
    def busy(self) -> bool:
        return bool(self._missing) or self._last is not None or self._assembler is not None

    @property
    def occupied(self) -> bool:
        """Whether workers still write parts, also of an abandoned checkpoint. Such workers would be late with the parts
        of a new checkpoint."""
        return self.busy or bool(self._writing)

    def slow(self) -> str:
        """The workers that the newest save waits for, in words: "workers 0.1, 1.2"."""
        silent = self._missing.values() or self.replicas.silent if self.busy else self._writing
        missing = [self._assembler] if self._assembler is not None else sorted(silent)
        return f"worker{'s' * (len(missing) != 1)} {', '.join(map(str, missing))}"

    def newest(self) -> Path | None:
        """The newest finished checkpoint. Does not access the disk."""
        return self.path(self._newest) if self._newest else None

    def unsaved(self) -> tuple[int, float]:
        """What the job would lose now: (steps in the newest checkpoint, 0 without one; seconds since this checkpoint
        was saved, or since the job or this coordinator started)."""
        return self._newest, round(time.monotonic() - self._newest_since, 1)

    async def look(self) -> None:
        """Finds the newest checkpoint that another coordinator has finished."""
        with suppress(OSError):  # a checkpoint that cannot be found is not offered to the user
            self._newest = max([self._newest, *await in_thread(finished, self._folder)])

    async def whole(self) -> Whole:
        """See `newest_whole`."""
        return await in_thread(newest_whole, self._folder)

    async def exists(self, step: int) -> bool:
        """Whether the checkpoint with this number of steps is finished."""
        return await in_thread(self.path(step).exists)

    def path(self, step: int) -> Path:
        """The folder of the checkpoint with this number of steps."""
        return self._folder / name(step)

    def restore_point(self, step: int, started: bool, present: int, stages: int) -> int:
        """The number of steps from which all workers restart.

        step: steps in the newest intact checkpoint; 0 without one. A job that has not `started` needs no checkpoint.
        Raises CannotRestore if there is no checkpoint to restart from, if the same checkpoint was restored last, or if
        there are fewer workers than stages.
        """
        if started and not step:
            reason = "and there is no checkpoint to restore it from; set checkpoint.every to lose less"
        elif step == self._restored:
            reason = f"for the second time since checkpoint {name(step)}"
        elif present < stages:
            reason = f"and {plural(present, 'worker')} cannot fill {plural(stages, 'stage')}"
        else:
            self._restored = step
            return step
        raise CannotRestore(reason, step)

    def begin(self, step: int, savers: Collection[Worker], final: bool, live: Collection[Worker]) -> None:
        """Begins a save, and abandons an unfinished older one.

        step: number of committed steps. live: workers that send digests.
        """
        self.step = step
        self.final = final
        self.failed = False
        self._assembler = None
        self._last = None
        self._sharded = len({w.stage for w in savers}) < len(savers)
        self._missing = {self._key(w): w for w in savers}
        self.replicas = Replicas(step, live)
        self._parts = {}
        self._whole = set()
        self._writing |= set(savers)

    def save_failed(self, message: SaveFailed, worker: Worker | None = None) -> bool:
        """Abandons the checkpoint. Returns False if the checkpoint is not being saved any more. worker: the sender of
        the message; None: this coordinator."""
        self._writing.discard(worker)  # type: ignore[arg-type]
        if message.step != self.step or not self.busy:
            return False
        self.failed = self.failed or self.final
        self.abandon()
        return True

    def abandon(self) -> None:
        self._missing = {}
        self._assembler = None
        self._last = None

    def saved(self, worker: Worker, message: Saved) -> list[Send]:
        """Records a finished part. If state is not sharded, any worker of the stage may have written the part, because
        all of them hold the same state."""
        self._writing.discard(worker)
        key = self._key(worker)
        if message.step != self.step or key not in self._missing or message.whole < (worker in self._whole):
            return []
        del self._missing[key]
        self._parts[worker] = message.part
        self._last = worker
        return self._assemble_if_complete()

    def compared(self, worker: Worker, message: Digests) -> list[Send]:
        """Records a worker's digests."""
        self.replicas.add(worker, message)
        return self._assemble_if_complete()

    def assembling(self, worker: Worker, message: Assembling) -> None:
        """Records that this coordinator or an earlier one has ordered this worker to assemble the checkpoint."""
        if message.step == self.step:
            self._missing = {}
            self._assembler = worker
            self._assembles = True
            self._last = None

    def assembled(self, message: Assembled) -> None:
        if message.step > self._newest:
            self._newest = message.step
            self._newest_since = time.monotonic()
        if message.step == self.step:
            self.abandon()

    def died(self, worker: Worker, live: Collection[Worker]) -> list[Send]:
        self.replicas.died(worker)
        self._writing.discard(worker)
        self._last = min(live, default=None) if worker == self._last else self._last
        if worker not in (*self._missing.values(), self._assembler):
            return self._assemble_if_complete()
        peers = sorted(w for w in live if w.stage == worker.stage)
        if not self.final or not peers:  # the next checkpoint is enough
            self.abandon()
            return []
        if self._assembler == worker:
            return self._assemble(min(live))
        if not self._sharded:
            self._missing[worker.stage] = peers[0]
            self._whole.add(peers[0])
            return [Send(peers[0], Save(self.step))]
        del self._missing[worker]
        asked = [peer for peer in peers if peer not in self._whole]
        self._missing |= {peer: peer for peer in asked}
        self._whole |= set(asked)
        return [Send(peer, Save(self.step)) for peer in asked] or self._assemble_if_complete()

    def only(self, live: Collection[Worker]) -> list[Send]:
        self._writing &= set(live)
        awaited = {w for w in (*self._missing.values(), *self.replicas.silent, self._assembler) if w is not None}
        return [send for worker in sorted(awaited - set(live)) for send in self.died(worker, live)]

    def returned(self, worker: Worker) -> list[Send]:
        """Repeats the request to a worker that this save waits for. The worker has already repeated its messages."""
        if worker == self._assembler and not self._assembles:
            return self._assemble(worker)
        asked = worker in self._whole and worker in self._missing.values()
        return [Send(worker, Save(self.step))] if asked else []

    def _assemble_if_complete(self) -> list[Send]:
        if self._missing or self.replicas.silent or self.replicas.verdict() or self._last is None:
            return []
        return self._assemble(self._last)

    def _assemble(self, worker: Worker) -> list[Send]:
        self._assembler = worker
        self._assembles = False
        self._last = None
        return [Send(worker, Assemble(self.step, list(self._parts.values())))]

    def _key(self, worker: Worker) -> object:
        return worker if self._sharded else worker.stage
