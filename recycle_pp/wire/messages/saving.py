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
