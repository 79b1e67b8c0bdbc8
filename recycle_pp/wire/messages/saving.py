"""Messages about checkpoints, and about the comparison of parameters between peers.

`step` always means the number of completed steps.
"""

from __future__ import annotations

import msgspec

from .table import COORDINATOR, WORKER, Message, sent


@sent(COORDINATOR, WORKER)
class Save(Message, frozen=True):
    """Write all units that you hold. Sent if a saver died at the end of the run."""

    step: int


@sent(WORKER, COORDINATOR, lasting=True)
class Saved(Message, frozen=True):
    """The worker has written its part of a checkpoint.

    whole  whether the part has all units that the worker holds, as `Save` requests
    part   name of the part's folder
    """

    step: int
    whole: bool = False
    part: str = ""


@sent(WORKER, COORDINATOR, lasting=True)
class SaveFailed(Message, frozen=True):
    step: int
    detail: str


@sent(COORDINATOR, WORKER)
class Assemble(Message, frozen=True):
    """All stages are saved: merge the parts into one checkpoint. parts: names of the parts' folders."""

    step: int
    parts: list[str] = msgspec.field(default_factory=list)


@sent(WORKER, COORDINATOR, lasting=True)
class Assembling(Message, frozen=True):
    step: int


@sent(WORKER, COORDINATOR, lasting=True)
class Assembled(Message, frozen=True):
    """All parts are on disks.

    whole  whether the worker has merged them. With `checkpoint.store` its node may lack the parts of other nodes
    parts  names of the parts' folders
    """

    step: int
    whole: bool = True
    parts: list[str] = msgspec.field(default_factory=list)


@sent(COORDINATOR, WORKER)
class Upload(Message, frozen=True):
    """Upload these parts of a checkpoint to the store (`checkpoint.store`). parts: names of folders on your disk."""

    step: int
    parts: list[str]


@sent(WORKER, COORDINATOR)
class Uploaded(Message, frozen=True):
    """parts: as in the request. files: path in the checkpoint -> [size in bytes, CRC-32]."""

    step: int
    parts: list[str]
    files: dict[str, list[int]]


@sent(WORKER, COORDINATOR)
class UploadFailed(Message, frozen=True):
    step: int
    detail: str


@sent(COORDINATOR, WORKER)
class Seal(Message, frozen=True):
    """All parts are in the store: make the checkpoint whole there. parts: names of their folders. files: all files."""

    step: int
    parts: list[str]
    files: dict[str, list[int]]


@sent(WORKER, COORDINATOR)
class Sealed(Message, frozen=True):
    step: int


@sent(WORKER, COORDINATOR, lasting=True)
class Digests(Message, frozen=True):
    """Digests of the worker's parameters after the commit of a checkpoint. digests: canonical name -> SHA-256."""

    step: int
    digests: dict[str, str]


@sent(WORKER, COORDINATOR, lasting=True)
class Finished(Message, frozen=True):
    """The worker's parameters are final. digests: canonical name -> SHA-256."""

    digests: dict[str, str]
