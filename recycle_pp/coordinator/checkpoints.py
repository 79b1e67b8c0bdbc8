"""Checkpoints, as the coordinator sees them: who saves, when all parts are there, who puts them together.

    saving.begin(step, savers, final, live)    # with the commit; one live worker a stage writes its part
    out = saving.saved(worker, message)     # when the last part is written: one worker assembles the checkpoint,
    out = saving.compared(worker, message)  # but not before all have said what they hold, and it is the same
    out = saving.died(worker, live)         # a saver died: at the end of the run a peer takes over, else it is given up
    out = saving.only(live)                 # whoever else is awaited has died

A checkpoint is named by the steps it contains: `step-000020` holds the state after steps 0 to 19.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from recycle_schedules import Worker

from recycle_pp.protocol.events import Send
from recycle_pp.state.checksum import damage
from recycle_pp.telemetry.checkpoint_folders import finished, name
from recycle_pp.telemetry.words import plural
from recycle_pp.wire.messages.workers import Assemble, Assembled, Assembling, Digests, Save, Saved, SaveFailed

from .replicas import Replicas


class CannotRestore(RuntimeError):
    """A reason, and the steps that the newest whole checkpoint holds."""

    def __init__(self, reason: str, step: int) -> None:
        super().__init__(reason)
        self.step = step


class Whole(NamedTuple):
    """step: steps done of the newest finished checkpoint that is whole, 0 without one. damaged: of newer ones, what is
    wrong with each, by its steps done."""

    step: int = 0
    damaged: Mapping[int, str] = MappingProxyType({})


NOTHING = Whole()


def newest_whole(folder: Path) -> Whole:
    """Reads every byte of the newest checkpoint, and of those before it as long as one is damaged: blocks for minutes
    where they are large."""
    damaged: dict[int, str] = {}
    for step, path in reversed(finished(folder).items()):
        wrong = damage(path, step)
        if wrong is None:
            return Whole(step, damaged)
        damaged[step] = wrong
    return Whole(0, damaged)


class Saving:
    """step, final: of the save under way, or the newest one: its steps done, and whether it is the last of the run."""

    def __init__(self, folder: Path, newest: int = 0) -> None:
        """newest: steps done of the newest checkpoint that is known."""
        self._folder = folder
        self._newest = newest
        self._newest_since = time.monotonic()
        self.step = -1
        self._missing: dict[object, Worker] = {}  # stage, or worker where all of a stage save -> who writes it
        self._parts: dict[Worker, str] = {}  # the parts that are there, by the workers that wrote them
        self._writing: set[Worker] = set()  # who has not said yet what became of its part, of whichever checkpoint
        self._whole: set[Worker] = set()  # who was asked for all that it holds, as another has died
        self._last: Worker | None = None  # who wrote its part last: it assembles, once the replicas are compared
        self.replicas = Replicas()
        self._assembler: Worker | None = None
        self.final = self._sharded = False
        self._restored = -1  # steps done of the checkpoint that was restored last
        self.failed = False  # the last checkpoint of the run could not be written

    @property
    def busy(self) -> bool:
        return bool(self._missing) or self._last is not None or self._assembler is not None

    @property
    def occupied(self) -> bool:
        """A save is under way, or somebody still writes its part of one that was given up: another one would fail for
        it, and its own parts would be what the one after that fails for."""
        return self.busy or bool(self._writing)

    def slow(self) -> str:
        """The workers whose part of the newest save is missing, in words: "workers 0.1, 1.2"."""
        silent = self._missing.values() or self.replicas.silent if self.busy else self._writing
        missing = [self._assembler] if self._assembler is not None else sorted(silent)
        return f"worker{'s' * (len(missing) != 1)} {', '.join(map(str, missing))}"

    def newest(self) -> Path | None:
        """The newest finished checkpoint, without a look at the disk."""
        return self.path(self._newest) if self._newest else None

    def unsaved(self) -> tuple[int, float]:
        """Steps in the newest finished checkpoint, 0 without one; and seconds since it was saved, or since the job or
        this coordinator began: what is lost if the job ends now."""
        return self._newest, round(time.monotonic() - self._newest_since, 1)

    def known(self, newest: int) -> None:
        """Another coordinator has finished the checkpoint of so many steps."""
        self._newest = max(self._newest, newest)

    def path(self, step: int) -> Path:
        """Of the finished checkpoint of so many steps."""
        return self._folder / name(step)

    def restore_point(self, step: int, started: bool, present: int, stages: int) -> int:
        """Steps done of the checkpoint at which everybody begins anew; never twice the same one. step: of the newest
        that is whole."""
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
        """`step`: steps done. A save that is still under way is given up: the newer one is worth more. live: who says
        what it holds."""
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
        """The checkpoint before stays the newest. False if this one is given up already. worker: who says it; None:
        this coordinator."""
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
        """Whoever of the stage has written it: all hold the same."""
        self._writing.discard(worker)
        key = self._key(worker)
        if message.step != self.step or key not in self._missing or message.whole < (worker in self._whole):
            return []
        del self._missing[key]
        self._parts[worker] = message.part
        self._last = worker
        return self._assemble_if_complete()

    def compared(self, worker: Worker, message: Digests) -> list[Send]:
        """A worker's digests have come."""
        self.replicas.say(worker, message)
        return self._assemble_if_complete()

    def assembling(self, worker: Worker, message: Assembling) -> None:
        """It was asked to, by this coordinator or by the one before."""
        if message.step == self.step:
            self._missing = {}
            self._assembler = worker
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
        if not self.final or not peers:  # the next one will do, or the job begins anew at the one before
            self.abandon()
            return []
        if self._assembler == worker:
            return self._assemble(min(live))
        if not self._sharded:
            self._missing[worker.stage] = peers[0]
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

    def _assemble_if_complete(self) -> list[Send]:
        if self._missing or self.replicas.silent or self.replicas.verdict() or self._last is None:
            return []
        return self._assemble(self._last)

    def _assemble(self, worker: Worker) -> list[Send]:
        self._assembler = worker
        self._last = None
        return [Send(worker, Assemble(self.step, list(self._parts.values())))]

    def _key(self, worker: Worker) -> object:
        return worker if self._sharded else worker.stage
