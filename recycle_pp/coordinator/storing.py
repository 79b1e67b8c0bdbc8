"""Tracks the upload of a checkpoint to the store on the coordinator: its missing parts, and the member that seals it.

    out = storing.begin(step, parts, whole, final, live)     # all parts are on local disks; requests their upload
    out = storing.uploaded(member, message)    # some parts are in the store; after the last one, requests the seal
    out = storing.died(member, live)           # requests the upload from another member; None: no other one has a part
    out = storing.returned(member)             # resends requests that may have been lost with the connection
    stages = storing.kept()                    # stages that no longer need a worker for the run's last checkpoint
    storing.validated(step, loss)              # for checkpoint.keep_best: the loss after this number of steps
    storing.sealed(message)                    # the checkpoint is whole in the store
    storing.failed(message)                    # abandons the checkpoint

A worker uploads the parts that it wrote. If it has died, another worker on its node uploads them. If the parts are
merged in a folder that all workers share (`whole`), any worker can upload them. Otherwise a checkpoint is not stored if
a node is lost before its upload.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

from recycle_pp.protocol.events import Send
from recycle_pp.telemetry.checkpoint_folders import writer
from recycle_pp.wire.messages.islands import OuterState
from recycle_pp.wire.messages.members import Assignment, Member
from recycle_pp.wire.messages.saving import Seal, Sealed, Upload, Uploaded, UploadFailed


class Storing:
    """The upload of one checkpoint.

    step         number of steps in the current or latest checkpoint
    final        whether this is the last checkpoint of the run
    failed_last  whether the last checkpoint of the run could not be stored
    """

    def __init__(self, assignment: Callable[[], Assignment], node: Callable[[Member], object]) -> None:
        """
        assignment  returns the job's assignment
        node        returns the identity of the member's node; None if its node is lost
        """
        self._assignment, self._node = assignment, node
        self.newest = 0  # number of steps in the newest checkpoint that may be in the store
        self._newest_since = time.monotonic()
        self.step = -1
        self.final = self.failed_last = False
        self._whole = False
        self._parts: list[str] = []
        self._uploading: dict[str, Member] = {}  # missing part -> member that uploads it
        self._files: dict[str, list[int]] = {}  # path in the checkpoint -> [size in bytes, CRC-32], of uploaded parts
        self._sealer: Member | None = None
        self._outer: OuterState | None = None  # for an island: its position after the steps of the checkpoint
        self._began = 0.0
        self._losses: dict[int, float] = {}  # number of steps -> validation loss, of validations since the last seal

    @property
    def busy(self) -> bool:
        return bool(self._uploading) or self._sealer is not None

    @property
    def uploading(self) -> int:
        """Number of steps in the checkpoint that is being stored; 0 if there is none."""
        return self.step if self.busy else 0

    def kept(self) -> list[int]:
        """The stages whose parts of the run's last checkpoint are in the store, or that any worker can upload, while
        the checkpoint is being stored."""
        if not (self.final and self.busy):
            return []
        missing = set() if self._whole else {writer(part)[1] for part in self._uploading}
        return sorted({worker.stage for worker in self._assignment().values()} - missing)

    def unsaved(self) -> tuple[int, float]:
        """(number of steps in the newest stored checkpoint or 0, seconds). The seconds count from the time when this
        checkpoint was stored, or when this object was created."""
        return self.newest, round(time.monotonic() - self._newest_since, 1)

    def begin(
        self,
        step: int,
        parts: list[str],
        whole: bool,
        final: bool,
        live: Collection[Member],
        outer: OuterState | None = None,
        writers: Mapping[str, Member] = MappingProxyType({}),
    ) -> list[Send] | None:
        """Starts an upload, and abandons an unfinished older one. Returns requests to upload the parts; None if a part
        is on no live member's disk.

        parts    names of the parts' folders
        whole    whether the parts are merged in a folder that all workers share
        outer    see `Assembled`
        writers  see `Saving.writers`
        """
        self._outer = outer
        self.step, self.final, self._whole = step, final, whole
        self.failed_last = False
        self._parts, self._files, self._sealer = list(parts), {}, None
        self._began = time.monotonic()
        members = {(worker.pipeline, worker.stage): member for member, worker in self._assignment().items()}
        # After a failover, some writers are unknown. The members that have their roles now are most likely the writers.
        return self._request({part: writers.get(part, members[writer(part)]) for part in parts}, live)

    def uploaded(self, member: Member, message: Uploaded) -> list[Send]:
        if message.step != self.step or not self._uploading:
            return []
        self._files |= message.files
        for part in message.parts:
            self._uploading.pop(part, None)
        return [] if self._uploading else self._seal(member)

    def validated(self, step: int, loss: float) -> None:
        self._losses[step] = loss

    def sealed(self, message: Sealed) -> float | None:
        """Records that a checkpoint is whole in the store. Returns the seconds since `begin`; None if the checkpoint
        was abandoned."""
        if message.step > self.newest:
            self.newest, self._newest_since = message.step, time.monotonic()
        if message.step != self.step or not self.busy:
            return None
        self._losses = {step: loss for step, loss in self._losses.items() if step >= message.step}
        self.abandon()
        return time.monotonic() - self._began

    def failed(self, message: UploadFailed) -> bool:
        """Abandons the checkpoint. Returns False if it is no longer being stored."""
        if message.step != self.step or not self.busy:
            return False
        self.failed_last = self.final
        self.abandon()
        return True

    def abandon(self) -> None:
        self._uploading, self._sealer = {}, None

    def restored(self, step: int) -> None:
        """Called when all workers restart from the checkpoint with this number of steps. Later checkpoints will be
        saved and stored again."""
        self.abandon()
        self.newest = min(self.newest, step)

    def died(self, member: Member, live: Collection[Member]) -> list[Send] | None:
        """Returns requests to other members, which replace those to a dead member. None if no live member can upload
        its parts or seal the checkpoint; the caller must then call `failed`."""
        if member == self._sealer:
            return self._seal(min(live)) if live else None
        lost = {part: of for part, of in self._uploading.items() if of == member}
        return self._request(lost, live) if lost else []

    def returned(self, member: Member) -> list[Send]:
        parts = [part for part, of in self._uploading.items() if of == member]
        if member == self._sealer:
            return self._seal(member)
        return [Send(member, Upload(self.step, parts))] if parts else []

    def _request(self, writers: dict[str, Member], live: Collection[Member]) -> list[Send] | None:
        """Returns requests to upload these parts; None if a part is on no live member's disk."""
        parts: dict[Member, list[str]] = defaultdict(list)
        for part, member in writers.items():
            self._uploading[part] = member
            if member not in live:
                node = self._node(member)
                near = [of for of in live if node is not None and self._node(of) == node]
                # If all writers were on one node, `_whole` does not mean that the nodes share the folder.
                near = near or [of for of in live if self._whole]
                if not near:
                    return None
                member = self._uploading[part] = min(near, key=lambda of: (len(parts.get(of, ())), of))
            parts[member].append(part)
        return [Send(member, Upload(self.step, some)) for member, some in parts.items()]

    def _seal(self, member: Member) -> list[Send]:
        self._sealer = member
        return [Send(member, Seal(self.step, self._parts, self._files, self._losses, self._outer))]
