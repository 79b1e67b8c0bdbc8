"""Tracks a checkpoint on the coordinator: which parts are missing, and which member assembles them.

    saving.begin(step, savers, final, live) # at the commit; the savers then write their parts
    out = saving.saved(member, message)     # a part is written
    out = saving.compared(member, message)  # a member's digests have arrived
    out = saving.died(member, live)         # the run's last checkpoint gets another saver; any other one is abandoned
    stages = saving.kept()                  # stages that no longer need a worker for the run's last checkpoint
    out = saving.only(live)                 # treats awaited members that are not in `live` as dead
    out = saving.returned(member)           # resends a request that may have been lost with the member's connection
    saving.restarted()                      # all workers restart; the checkpoint is abandoned

One member assembles the checkpoint once all parts are written and the digests of all live members agree. Checkpoints
are named by their number of steps: `step-000020` contains the state after steps 0 to 19.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from recycle_pp.protocol.events import Send
from recycle_pp.state.checksum import lasting_damage
from recycle_pp.state.replacing import set_aside
from recycle_pp.state.survey import Survey, survey
from recycle_pp.storage.store import StoreError
from recycle_pp.telemetry.background import in_thread
from recycle_pp.telemetry.checkpoint_folders import finished, name
from recycle_pp.wire.messages.islands import OuterState
from recycle_pp.wire.messages.members import Assignment, Member
from recycle_pp.wire.messages.saving import Assemble, Assembled, Assembling, Digests, Save, Saved, SaveFailed

from .replicas import Replicas

STORE_SECONDS = 60.0  # how long to repeat a request to a store that does not answer


class Whole(NamedTuple):
    """The newest whole checkpoint.

    step     number of steps in the newest intact checkpoint; 0 if there is none
    damaged  number of steps in a newer checkpoint -> description of its damage, or why it could not be read
    """

    step: int = 0
    damaged: Mapping[int, str] = MappingProxyType({})


NOTHING = Whole()


def newest_whole(folder: Path, store: str | None = None) -> Whole:
    """The newest intact checkpoint, in the folder or in the store. Reads it and all newer checkpoints of the folder
    completely, which may block for minutes. Renames the newer ones that are damaged to `step-000040.damaged`. If the
    disk fails, they may be intact and keep their names.

    store: the URL of `checkpoint.store`, or None. Raises StoreError if it cannot be reached, OSError if the folder
    cannot be read.
    """
    whole, broken = _newest(folder, Survey() if store is None else survey(store, STORE_SECONDS))
    # Without the damaged folders here, workers download the store's copy, and `checkpoint.keep` counts only intact
    # checkpoints.
    damaged = dict(whole.damaged)
    for step, path in broken.items():
        try:
            set_aside(path)
        except OSError as error:
            if step == whole.step:  # workers would load it
                raise
            damaged[step] += f"; it could not be renamed: {error.strerror}"
    return Whole(whole.step, damaged)


def newest_of(folder: Path, stored: Survey) -> Whole:
    """Like `newest_whole`, for a store whose checkpoints are known. Renames nothing, so that the coordinator finds and
    reports the damaged ones too."""
    return _newest(folder, stored)[0]


def _newest(folder: Path, stored: Survey) -> tuple[Whole, dict[int, Path]]:
    """The newest intact checkpoint, and those in the folder that must be renamed, by their steps."""
    while True:
        here = finished(folder)
        found = _newest_in(here, stored)
        if finished(folder).keys() <= here.keys():
            return found
        # A worker has just finished a newer checkpoint, and may have deleted the one that was being read.


def _newest_in(here: Mapping[int, Path], stored: Survey) -> tuple[Whole, dict[int, Path]]:
    """Like `_newest`. here: see `finished`"""
    damaged: dict[int, str] = {}
    broken: dict[int, Path] = {}
    for step in sorted({*here, *stored.damaged, stored.step} - {0}, reverse=True):
        wrong = stored.damaged.get(step)
        if step in here:
            try:
                wrong = lasting_damage(here[step], step)
                lasts = wrong is not None
            except OSError as error:
                wrong, lasts = f"the disk failed: {error}", step == stored.step
            broken |= {step: here[step]} if lasts else {}
        if wrong is None or step == stored.step:
            return Whole(step, damaged), broken
        damaged[step] = wrong
    return Whole(0, damaged), {}


class Saving:
    """The checkpoint that is being saved, and the newest one that is complete.

    step   number of steps in the current or latest checkpoint
    final  whether this is the last checkpoint of the run
    """

    def __init__(
        self,
        folder: Path,
        assignment: Callable[[], Assignment],
        newest: int = 0,
        store: str | None = None,
        uploading: Callable[[], int] = lambda: 0,
    ) -> None:
        """
        assignment  returns the job's assignment
        newest      number of steps in the newest known checkpoint
        store       URL of `checkpoint.store`, or None
        uploading   returns the number of steps in the checkpoint that is being uploaded, or 0
        """
        self._folder, self._assignment, self._store = folder, assignment, store
        self._uploading = uploading
        self._newest = newest
        self.found: Mapping[int, list[str]] = {}  # number of steps in a checkpoint that `look` has found -> its parts
        self.stored_step = 0  # number of steps in the newest checkpoint in the store
        self._newest_since = time.monotonic()  # when the newest checkpoint was saved, or this object created
        self.step = -1
        self._missing: dict[int, Member] = {}  # stage (if sharded: member) -> member whose part is missing
        self._parts: dict[Member, str] = {}  # member -> folder name of its finished part
        self.writing: set[Member] = set()  # members still writing a part, even if the checkpoint was abandoned
        self._whole: set[Member] = set()  # members asked to save every unit they hold, because a peer died
        self._last: Member | None = None  # member that wrote the last part; assembles all parts once the digests agree
        self.replicas = Replicas()
        self._assembler: Member | None = None
        self._assembles = False  # whether the assembler has received its request
        self.final = self._sharded = False
        self._outer: OuterState | None = None  # for an island: its position after the steps of the current checkpoint
        self.failed = False  # whether the last checkpoint of the run could not be written

    @property
    def busy(self) -> bool:
        return bool(self._missing) or self._last is not None or self._assembler is not None

    @property
    def assembles(self) -> bool:
        """Whether a member merges the parts of a checkpoint. It then deletes older checkpoints."""
        return self._assembler is not None

    @property
    def occupied(self) -> bool:
        """Whether a checkpoint is being saved, or a member is still writing a part of an abandoned one. Such a member
        would be late with its part of a new checkpoint."""
        return self.busy or bool(self.writing)

    def kept(self) -> list[int]:
        """The stages whose parts of the run's last checkpoint are written, while it is being saved. With a store there
        are none, because each node may keep its parts on its own disk."""
        if not (self.final and self.busy and self._store is None):
            return []
        assignment = self._assignment()
        missing = {assignment[member].stage for member in self._missing.values()}
        return sorted({worker.stage for worker in assignment.values()} - missing)

    @property
    def writers(self) -> dict[str, Member]:
        """Part of the current or latest checkpoint -> member that wrote it. Its role may have changed since."""
        return {part: member for member, part in self._parts.items()}

    def slow(self) -> str:
        """The workers that delay the current save, as text: "workers 0.1, 1.2"."""
        silent = self._missing.values() or self.replicas.silent if self.busy else self.writing
        missing = [self._assembler] if self._assembler is not None else sorted(silent)
        names = [str(self._assignment()[member]) for member in missing]
        return f"worker{'s' * (len(names) != 1)} {', '.join(names)}"

    def newest(self) -> Path | str | None:
        """Path or URL of the newest whole checkpoint, or None. Does not access the disk."""
        if self.stored_step > self._newest:
            return f"{self._store}/{name(self.stored_step)}"
        return self.path(self._newest) if self._newest else None

    @property
    def newest_step(self) -> int:
        """Number of steps in the newest whole checkpoint; 0 if there is none."""
        return max(self._newest, self.stored_step)

    def unsaved(self) -> tuple[int, float]:
        """(number of steps in the newest checkpoint or 0, seconds of unsaved work). The seconds count from when
        the checkpoint was saved, or from when this coordinator started if that is later."""
        return self.newest_step, round(time.monotonic() - self._newest_since, 1)

    async def look(self) -> None:
        """Looks for checkpoints that an earlier coordinator finished."""
        with suppress(OSError):  # if the folder is unreadable, messages to the user name no checkpoint
            self.found = await in_thread(_parts, self._folder)
            self._newest = max([self._newest, *self.found])
        if self._store is not None:
            with suppress(StoreError):
                self.stored_step = max(self.stored_step, (await in_thread(survey, self._store, 0.0)).step)

    async def whole(self) -> Whole:
        """Like `newest_whole`, but uses only the folder if the store cannot be reached. If a newer checkpoint is known,
        `damaged` then contains the reason. Raises ValueError, with one sentence, if no checkpoint could be read."""
        try:
            return await in_thread(newest_whole, self._folder, self._store)
        except (StoreError, OSError) as error:
            reason, whole = str(error), NOTHING
        if self._store is not None:
            with suppress(OSError):
                whole = await in_thread(newest_whole, self._folder)
        if not whole.step:
            raise ValueError(f"no checkpoint could be read: {reason}")
        if self.newest_step > whole.step:
            whole = Whole(whole.step, {self.newest_step: reason, **whole.damaged})
        return whole

    def path(self, step: int) -> Path:
        """The folder of the checkpoint with this number of steps."""
        return self._folder / name(step)

    def begin(
        self,
        step: int,
        savers: Collection[Member],
        final: bool,
        live: Collection[Member],
        outer: OuterState | None = None,
    ) -> None:
        """Starts a save, and abandons an unfinished older one.

        step: number of committed steps. live: members that send digests. outer: see `Assemble`
        """
        self.step, self._outer = step, outer
        self.final = final
        self.failed = False
        self._assembler = None
        self._last = None
        assignment = self._assignment()
        self._sharded = len({assignment[member].stage for member in savers}) < len(savers)
        self._missing = {self._key(member): member for member in savers}
        self.replicas = Replicas(step, {member: assignment[member] for member in live})
        self._parts = {}
        self._whole = set()
        self.writing |= set(savers)

    def save_failed(self, message: SaveFailed, member: Member | None = None) -> bool:
        """Abandons the checkpoint. Returns False if it is no longer being saved. member: sender of the message, or
        None for this coordinator."""
        self.writing.discard(member)  # type: ignore[arg-type]
        if message.step != self.step or not self.busy:
            return False
        self.failed = self.failed or self.final
        self.abandon()
        return True

    def abandon(self) -> None:
        self._missing = {}
        self._assembler = None
        self._last = None

    def restarted(self) -> None:
        """Abandons the checkpoint. New processes replace all live workers, so no part is being written any more."""
        self.abandon()
        self.writing.clear()

    def saved(self, member: Member, message: Saved) -> list[Send]:
        """Records a finished part. Unless state is sharded, any member of the stage may have written it."""
        self.writing.discard(member)
        key = self._key(member)
        if message.step != self.step or key not in self._missing or message.whole < (member in self._whole):
            return []
        del self._missing[key]
        self._parts[member] = message.part
        self._last = member
        return self._assemble_if_complete()

    def compared(self, member: Member, message: Digests) -> list[Send]:
        """Records a member's digests."""
        self.replicas.add(member, message)
        return self._assemble_if_complete()

    def assembling(self, member: Member, message: Assembling) -> None:
        """Records that a member has begun to assemble the checkpoint, as requested by this coordinator or an earlier
        one."""
        if message.step == self.step:
            self._missing = {}
            self._assembler = member
            self._assembles = True
            self._last = None

    def assembled(self, message: Assembled) -> None:
        if message.whole and message.step > self._newest:
            self._newest = message.step
            self._newest_since = time.monotonic()
        if message.step == self.step:
            self.abandon()

    def stored(self, step: int) -> None:
        """Records that the checkpoint with this number of steps is whole in the store."""
        if step > self.newest_step:
            self._newest_since = time.monotonic()
        self.stored_step = max(self.stored_step, step)

    def died(self, member: Member, live: Collection[Member]) -> list[Send]:
        self.replicas.died(member)
        self.writing.discard(member)
        self._last = min(live, default=None) if member == self._last else self._last
        if member not in (*self._missing.values(), self._assembler):
            return self._assemble_if_complete()
        assignment = self._assignment()
        stage = assignment[member].stage
        peers = sorted(peer for peer in live if assignment[peer].stage == stage)
        heirs = live if self._assembler == member else peers
        if not self.final or not heirs:  # only the run's last checkpoint is worth saving, as no other one follows it
            self.failed = self.failed or self.final
            self.abandon()
            return []
        if self._assembler == member:
            return self._assemble(min(live))
        if not self._sharded:
            self._missing[stage] = peers[0]
            self._whole.add(peers[0])
            return [Send(peers[0], Save(self.step))]
        del self._missing[member]
        asked = [peer for peer in peers if peer not in self._whole]
        self._missing |= {peer: peer for peer in asked}
        self._whole |= set(asked)
        return [Send(peer, Save(self.step)) for peer in asked] or self._assemble_if_complete()

    def only(self, live: Collection[Member]) -> list[Send]:
        self.writing &= set(live)
        awaited = {m for m in (*self._missing.values(), *self.replicas.silent, self._assembler) if m is not None}
        return [send for member in sorted(awaited - set(live)) for send in self.died(member, live)]

    def returned(self, member: Member) -> list[Send]:
        """Resends the pending request, if any, to a reconnected member, which has already resent its messages."""
        if member == self._assembler and not self._assembles:
            return self._assemble(member)
        asked = member in self._whole and member in self._missing.values()
        return [Send(member, Save(self.step))] if asked else []

    def _assemble_if_complete(self) -> list[Send]:
        if self._missing or self.replicas.silent or self.replicas.verdict() or self._last is None:
            return []
        return self._assemble(self._last)

    def _assemble(self, member: Member) -> list[Send]:
        self._assembler = member
        self._assembles = False
        self._last = None
        return [Send(member, Assemble(self.step, list(self._parts.values()), self._uploading(), self._outer))]

    def _key(self, member: Member) -> int:
        """The member's key in `_missing`."""
        return member if self._sharded else self._assignment()[member].stage


def _parts(folder: Path) -> dict[int, list[str]]:
    """Number of steps in each finished checkpoint -> names of its parts."""
    found: dict[int, list[str]] = {}
    for step, path in finished(folder).items():
        with suppress(FileNotFoundError):  # a worker has just deleted this old checkpoint
            found[step] = sorted(part.name for part in path.iterdir() if part.is_dir())
    return found
