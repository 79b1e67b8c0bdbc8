"""Messages about checkpoints, and about the comparison of parameters between peers.

`step` always means the number of completed steps.
"""

from __future__ import annotations

import msgspec

from .islands import OuterState
from .table import COORDINATOR, WORKER, Message, sent


@sent(COORDINATOR, WORKER)
class Save(Message, frozen=True):
    """Write all units that you hold. Sent if a saver died during the last checkpoint of the run."""

    step: int


@sent(WORKER, COORDINATOR, lasting=True)
class Saved(Message, frozen=True):
    """The worker has written its part of a checkpoint.

    whole  whether the part contains all units that the worker holds, as `Save` requests
    part   name of the part's folder
    """

    step: int
    whole: bool = False
    part: str = ""


@sent(WORKER, COORDINATOR, lasting=True)
class SaveFailed(Message, frozen=True):
    """The worker could not write its part of a checkpoint, or could not assemble the checkpoint. Also sent by an
    understudy that has taken over another worker before it wrote its part."""

    step: int
    detail: str


@sent(COORDINATOR, WORKER)
class Assemble(Message, frozen=True):
    """All parts are written, so merge them into one checkpoint.

    parts      names of the parts' folders
    uploading  number of steps in an older checkpoint that must not be deleted, because it is being uploaded; 0 if none
    outer      for an island, its position in the rounds after these steps; else None
    """

    step: int
    parts: list[str] = msgspec.field(default_factory=list)
    uploading: int = 0
    outer: OuterState | None = None


@sent(WORKER, COORDINATOR, lasting=True)
class Assembling(Message, frozen=True):
    """The worker has received `Assemble` and begins to merge the parts."""

    step: int


@sent(WORKER, COORDINATOR, lasting=True)
class Assembled(Message, frozen=True):
    """All parts of a checkpoint are on the disks of the nodes that wrote them.

    whole  whether the worker has merged the parts; False if its node lacks the parts of other nodes, which may happen
           with `checkpoint.store`
    parts  names of the parts' folders
    outer  as in the request
    """

    step: int
    whole: bool = True
    parts: list[str] = msgspec.field(default_factory=list)
    outer: OuterState | None = None


@sent(COORDINATOR, WORKER)
class Upload(Message, frozen=True):
    """Upload these parts of a checkpoint to the store (`checkpoint.store`). parts: names of folders on your disk."""

    step: int
    parts: list[str]


@sent(WORKER, COORDINATOR)
class Uploaded(Message, frozen=True):
    """The parts are in the store.

    parts  as in the request
    files  path in the checkpoint -> [size in bytes, CRC-32]
    """

    step: int
    parts: list[str]
    files: dict[str, list[int]]


@sent(WORKER, COORDINATOR)
class UploadFailed(Message, frozen=True):
    """The checkpoint could not be uploaded or sealed."""

    step: int
    detail: str


@sent(COORDINATOR, WORKER)
class Seal(Message, frozen=True):
    """All parts are in the store, so complete the checkpoint there. It is invalid until then.

    parts   names of the parts' folders
    files   all files: path in the checkpoint -> [size in bytes, CRC-32]
    losses  number of steps -> validation loss after them, of all validations since the last seal
    outer   as in `Assemble`
    """

    step: int
    parts: list[str]
    files: dict[str, list[int]]
    losses: dict[int, float] = msgspec.field(default_factory=dict)
    outer: OuterState | None = None


@sent(WORKER, COORDINATOR)
class Sealed(Message, frozen=True):
    """The checkpoint in the store is complete."""

    step: int


@sent(WORKER, COORDINATOR, lasting=True)
class Digests(Message, frozen=True):
    """Digests of the worker's parameters after `step` steps, when a checkpoint is saved.

    digests: canonical name of a parameter -> SHA-256
    """

    step: int
    digests: dict[str, str]


@sent(WORKER, COORDINATOR, lasting=True)
class Finished(Message, frozen=True):
    """The worker's parameters are final. digests: canonical name of a parameter -> SHA-256."""

    digests: dict[str, str]
