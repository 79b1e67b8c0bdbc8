"""Checkpoints, and the comparison of parameters between peers."""

from __future__ import annotations

import msgspec

from .table import COORDINATOR, WORKER, Message, sent


@sent(COORDINATOR, WORKER)
class Save(Message, frozen=True):
    """At the end of the run, a saver died: write all units that you hold. step: completed steps."""

    step: int


@sent(WORKER, COORDINATOR, lasting=True)
class Saved(Message, frozen=True):
    """The worker has written its part of a checkpoint.

    step   completed steps, here and in the next three messages
    whole  the part has all units that the worker holds, as requested by `Save`
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
    """All stages are saved: merge the parts into one checkpoint. step: completed steps; parts: their folders."""

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
    """SHA-256 of the worker's parameters, by canonical name, after the commit of a checkpoint. step: completed
    steps."""

    step: int
    digests: dict[str, str]


@sent(WORKER, COORDINATOR, lasting=True)
class Finished(Message, frozen=True):
    """The worker's parameters are final. digests: SHA-256 of each, by canonical name."""

    digests: dict[str, str]
