"""Tracks the upload of a checkpoint to the store on the coordinator: its missing parts, and the member that seals it.

    storing.begin(step, parts, whole, final, live)  # requests; all parts are on disks
    storing.uploaded(member, message)       # some parts are in the store; the last one is followed by the seal
    storing.sealed(message)                 # the checkpoint is whole in the store
    storing.died(member, live)              # requests to a neighbour that sees the same disk, or None: abandoned
    storing.failed(message)
    storing.returned(member)                # repeats requests that may be lost, as the connection was reset

A worker uploads what it wrote. If it has died, another worker of its node does it. If all workers have merged the
checkpoint in one common folder (`whole`), any worker does it. Otherwise the loss of a node before its upload costs the
checkpoint.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection

from recycle_pp.protocol.events import Send
from recycle_pp.telemetry.checkpoint_folders import writer
from recycle_pp.wire.messages.members import Assignment, Member
from recycle_pp.wire.messages.saving import Seal, Sealed, Upload, Uploaded, UploadFailed


class Storing:
    """
    step   number of steps in the current or latest checkpoint
    final  whether this is the last checkpoint of the run
    failed_last  whether the last checkpoint of the run could not be stored
    """

    def __init__(self, assignment: Callable[[], Assignment], node: Callable[[Member], object], newest: int = 0) -> None:
        """
        assignment  returns the job's assignment
        node        returns an identity of the member's node; None if its node is lost
        newest      number of steps in the newest checkpoint that may be in the store
        """
        self._assignment, self._node = assignment, node
        self.newest = newest
        self._newest_since = time.monotonic()
        self.step = -1
        self.final = self.failed_last = False
        self._whole = False
        self._parts: list[str] = []
        self._uploading: dict[str, Member] = {}  # missing part -> member that uploads it
        self._files: dict[str, list[int]] = {}
        self._sealer: Member | None = None
        self._began = 0.0

    @property
    def busy(self) -> bool:
        return bool(self._uploading) or self._sealer is not None

    def unsaved(self) -> tuple[int, float]:
        """(number of steps in the newest stored checkpoint or 0, seconds since it was stored or this began)."""
        return self.newest, round(time.monotonic() - self._newest_since, 1)

    def begin(
        self, step: int, parts: list[str], whole: bool, final: bool, live: Collection[Member]
    ) -> list[Send] | None:
        """Starts an upload, and abandons an unfinished older one. Returns requests, or None as `died` does."""
        self.step, self.final, self._whole = step, final, whole
        self.failed_last = False
        self._parts, self._files, self._sealer = list(parts), {}, None
        self._began = time.monotonic()
        members = {(worker.pipeline, worker.stage): member for member, worker in self._assignment().items()}
        return self._request({part: members[writer(part)] for part in parts}, live)

    def uploaded(self, member: Member, message: Uploaded) -> list[Send]:
        if message.step != self.step or not self._uploading:
            return []
        self._files |= message.files
        for part in message.parts:
            self._uploading.pop(part, None)
        return [] if self._uploading else self._seal(member)

    def sealed(self, message: Sealed) -> float | None:
        """Seconds since `begin`; None if the checkpoint was abandoned."""
        if message.step > self.newest:
            self.newest, self._newest_since = message.step, time.monotonic()
        if message.step != self.step or not self.busy:
            return None
        self.abandon()
        return time.monotonic() - self._began

    def failed(self, message: UploadFailed) -> bool:
        """Abandons the checkpoint. False if it is no longer being stored."""
        if message.step != self.step or not self.busy:
            return False
        self.failed_last = self.final
        self.abandon()
        return True

    def abandon(self) -> None:
        self._uploading, self._sealer = {}, None

    def restored(self, step: int) -> None:
        """All workers restart from the checkpoint with this number of steps."""
        self.abandon()
        self.newest = min(self.newest, step)

    def died(self, member: Member, live: Collection[Member]) -> list[Send] | None:
        """Requests that replace those to a dead member. None: the checkpoint is lost, and still counts as `busy`."""
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
        """Requests to upload these parts. None if a part is on no live member's disk."""
        parts: dict[Member, list[str]] = defaultdict(list)
        for part, member in writers.items():
            self._uploading[part] = member
            if member not in live:
                node = self._node(member)
                near = [of for of in live if self._whole or (node is not None and self._node(of) == node)]
                if not near:
                    return None
                member = self._uploading[part] = min(near, key=lambda of: (len(parts.get(of, ())), of))
            parts[member].append(part)
        return [Send(member, Upload(self.step, some)) for member, some in parts.items()]

    def _seal(self, member: Member) -> list[Send]:
        self._sealer = member
        return [Send(member, Seal(self.step, self._parts, self._files))]
