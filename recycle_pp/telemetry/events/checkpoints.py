"""Checkpoints that were saved, stored, skipped, damaged or not written."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from recycle_pp.wire.records import Count, Seconds

from .event import Event


class CheckpointSaved(Event):
    """A checkpoint is complete. `checkpoint`: number of steps in it."""

    exported = True
    checkpoint: Count

    def text(self) -> str:
        return f"{folder(self.checkpoint)} saved"


class CheckpointDamaged(Event):
    """A checkpoint is damaged or cannot be read, so the job looks for an older one. `checkpoint`: number of steps in
    it. `detail`: what is wrong."""

    checkpoint: Count
    detail: str

    def text(self) -> str:
        return f"{folder(self.checkpoint)} is damaged or cannot be read, and is skipped: {self.detail}"


class CheckpointFailed(Event):
    """A checkpoint was not written. `checkpoint`: number of steps that it would contain. `detail`: why. `newest`:
    number of steps in the newest complete checkpoint, 0 without one. `unsaved_seconds`: time since it was saved or,
    without one, since the job or its coordinator began."""

    checkpoint: Count
    detail: str
    newest: Count | UnsetType = UNSET
    unsaved_seconds: Seconds = 0.0

    def text(self) -> str:
        return f"{folder(self.checkpoint)} was not saved: {self.detail}{_unsaved(self.newest, self.unsaved_seconds)}"


class CheckpointSkipped(Event):
    """A checkpoint was due while the previous one was still being written. `checkpoint`: number of steps that it would
    contain. `by`: the workers that were still writing. `newest`, `unsaved_seconds`: as for `checkpoint_failed`."""

    checkpoint: Count
    by: str
    newest: Count | UnsetType = UNSET
    unsaved_seconds: Seconds = 0.0

    def text(self) -> str:
        unsaved = _unsaved(self.newest, self.unsaved_seconds)
        return f"{self.by} had not finished the previous checkpoint, so {folder(self.checkpoint)} was skipped{unsaved}"


class CheckpointStored(Event):
    """A checkpoint is complete in the store (`checkpoint.store`). `checkpoint`: number of steps in it. `seconds`: since
    its parts were on the disks."""

    exported = True
    checkpoint: Count
    seconds: Seconds = 0.0

    def text(self) -> str:
        return f"{folder(self.checkpoint)} is in the store, after {self.seconds:.1f} s"


class CheckpointNotStored(Event):
    """A checkpoint did not reach the store. `checkpoint`: number of steps in it. `detail`: why. `newest`: number of
    steps in the newest checkpoint that is complete there, 0 without one. `unsaved_seconds`: time since it was stored
    or, without one, since the job or its coordinator began."""

    checkpoint: Count
    detail: str
    newest: Count
    unsaved_seconds: Seconds

    def text(self) -> str:
        age = f"{self.unsaved_seconds:.0f} s"
        stored = f"the newest there is step-{self.newest:06d}, stored {age} ago" if self.newest else (
            f"none was stored in {age}"
        )  # fmt: skip
        return f"{folder(self.checkpoint)} is not in the store: {self.detail}; {stored}"


def folder(checkpoint: int) -> str:
    """A checkpoint in words, such as "checkpoint step-000020". checkpoint: number of steps in it, or 0."""
    return f"checkpoint step-{checkpoint:06d}" if checkpoint else "step 0"


def _unsaved(newest: int | UnsetType, seconds: float) -> str:
    """The checkpoint that a resume would use and its age, in words. newest: absent in runs of earlier versions."""
    if newest is UNSET:
        return ""
    age = f"{seconds:.0f} s"
    return f"; the newest is step-{newest:06d}, saved {age} ago" if newest else f"; none was saved in {age}"
