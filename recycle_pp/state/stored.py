"""Checkpoints in an object store (`checkpoint.store`). Does not import torch.

    stored = StoredCheckpoints(Store("s3://bucket/runs/mine"))
    files = stored.upload(20, path)               # a part on this node's disk; {"stage-0-0-ab12/x": [size, crc]}
    stored.seal(20, about, files, table)          # True: the checkpoint is whole now
    stored.prune(20, keep=2)                      # after the seal of checkpoint 20
    stored.steps()                                # whole checkpoints, oldest first
    stored.damage(20)                             # None, or what is missing
    stored.fetch(20, folder)                      # folder/step-000020, as `checkpoint.finish` leaves it
    steps_in(folder, url)                         # checkpoints in a run folder, or else in its store
    here(url, folder, 20)                         # like `fetch`, but also finds a checkpoint that is only on the disk

Objects below the store's URL:

    checkpoints/step-000020/stage-0-0-ab12cd34/...    the parts, under names that no other save uses
    checkpoints/sealed/step-000020.json               the seal: about.json, and torch's table of contents
    checkpoints/newest                                the number of steps in the newest whole checkpoint
    checkpoints/losses.json                           validation losses of the checkpoints (checkpoint.keep_best)

A seal is written after all parts, and only if this step has no seal yet. If two members seal the same checkpoint, only
one succeeds, and the other neither changes nor deletes the parts in that seal. The object `newest` exists because the
listings of some stores lack objects that are only seconds old.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from recycle_pp.storage.store import Absent, Store, StoreError
from recycle_pp.storage.turn import turn
from recycle_pp.telemetry.checkpoint_folders import finished, name, step_of, temporary

from .checksum import ABOUT, TABLE, fingerprint
from .replacing import rename, sync, write_synced

ROOT = "checkpoints"
SEALS = f"{ROOT}/sealed"
NEWEST = f"{ROOT}/newest"
LOSSES = f"{ROOT}/losses.json"
Files = Mapping[str, Sequence[int]]  # path in the checkpoint -> [size in bytes, CRC-32]


class Seal(msgspec.Struct):
    """The content of a seal.

    step   number of steps
    files  the files with tensors
    about  content of about.json
    table  content of .metadata
    """

    step: int
    files: Files
    about: dict[str, Any]
    table: bytes  # in base64


class StoredCheckpoints:
    """The checkpoints in one store. All methods raise StoreError if the store fails."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def steps(self) -> list[int]:
        """Numbers of steps in the whole checkpoints, oldest first."""
        listed = (step_of(path.rsplit("/", 1)[-1].removesuffix(".json")) for path in self.store.list(SEALS))
        steps = {step for step in listed if step is not None}
        with suppress(Absent):
            newest = int(self.store.get(NEWEST))
            if newest not in steps and self.is_sealed(newest):
                steps.add(newest)
        return sorted(steps)

    def upload(self, step: int, part: Path) -> dict[str, list[int]]:
        """Uploads the files of one part. Returns their fingerprints by path in the checkpoint."""
        files = {f"{part.name}/{path.name}": path for path in sorted(part.iterdir())}
        for file, path in files.items():
            self.store.put_file(_object(step, file), path)
        return {file: fingerprint(path) for file, path in files.items()}

    def seal(self, step: int, about: Mapping[str, Any], files: Files, table: Path) -> bool:
        """Seals a checkpoint. Returns True if the store now has this seal, False if another member has sealed other
        parts.

        about  JSON for a resume, see `checkpoint.describe`
        files  fingerprints of the files with tensors
        table  the file with torch's table of contents of all parts
        """
        described = {"step": step, **about, "files": {TABLE: fingerprint(table), **files}}
        seal = msgspec.json.encode(Seal(step, files, described, table.read_bytes()))
        if not self.store.put_if_absent(_seal(step), seal):
            if self.damage(step) is None:
                return False
            self.store.delete([_seal(step)])  # a damaged checkpoint, made before the job restarted from an older one
            if not self.store.put_if_absent(_seal(step), seal):
                return False
        self.store.put(NEWEST, str(step).encode())
        return True

    def prune(self, step: int, keep: int, losses: Mapping[int, float] | None = None) -> None:
        """Deletes the checkpoints up to step `step`, whose checkpoint has just been sealed, except the newest `keep`.
        Also deletes the parts of older checkpoints without a seal, and damaged checkpoints of later steps, which
        existed before the job restarted from an older checkpoint.

        losses  number of steps -> validation loss, for checkpoints validated since the last call; the store contains
                the losses from earlier calls. None: do not keep the checkpoint with the lowest loss
        """
        sealed = self.steps()
        steps = [number for number in sealed if number <= step]
        kept = {*steps[-keep:], *(self._best(steps, losses) if losses is not None else ())}
        unwanted = [number for number in sealed if number not in kept and (number <= step or self.damage(number))]
        self.store.delete(_seal(number) for number in unwanted)
        found = {number for folder in self.store.folders(ROOT) if (number := step_of(folder)) is not None}
        for number in sorted(found - kept):
            # `is_sealed` looks up the seal itself, because a listing may lack a new seal.
            if (number < step or number in unwanted) and not self.is_sealed(number):
                self.store.delete(self.store.list(f"{ROOT}/{name(number)}"))

    def _best(self, steps: Sequence[int], losses: Mapping[int, float]) -> list[int]:
        """[number of steps of the checkpoint with the lowest validation loss], or [] if none was validated. Records
        the losses in the store."""
        try:
            before = msgspec.json.decode(self.store.get(LOSSES), type=dict[int, float])
        except Absent:
            before = {}
        known = {step: loss for step, loss in (before | dict(losses)).items() if step in steps and math.isfinite(loss)}
        if known != before:
            self.store.put(LOSSES, msgspec.json.encode(known))
        return [min(known, key=known.__getitem__)] if known else []

    def is_sealed(self, step: int) -> bool:
        """Whether there is a whole checkpoint with this number of steps."""
        try:
            return self.store.size(_seal(step)) > 0
        except Absent:
            return False

    def is_whole(self, step: int) -> bool:
        """Whether there is a whole checkpoint with this number of steps, and none of its objects is missing."""
        return self.is_sealed(step) and self.damage(step) is None

    def read(self, step: int) -> Seal:
        """The seal of a checkpoint. Raises Absent if there is no whole checkpoint with this number of steps, ValueError
        if its seal is damaged."""
        content = self.store.get(_seal(step))
        try:
            seal = msgspec.json.decode(content, type=Seal)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{self.store.url}/{_seal(step)} is damaged: {error}") from None
        if seal.step != step:
            raise ValueError(f"{self.store.url}/{_seal(step)} is the seal of a different checkpoint")
        return seal

    def damage(self, step: int) -> str | None:
        """A description of the damage to a sealed checkpoint; None if it is intact. Compares only the sizes of the
        objects, while `fetch` compares checksums."""
        try:
            for file, (size, _) in self.read(step).files.items():
                if (now := self.store.size(_object(step, file))) != size:
                    return f"{self.store.url}/{_object(step, file)} has {now} bytes, expected {size}"
        except ValueError as error:
            if isinstance(error, StoreError) and not isinstance(error, Absent):
                raise  # the store failed, which says nothing about the checkpoint
            return str(error)
        return None

    def fetch(self, step: int, folder: Path, progress: Callable[[], None] = lambda: None) -> Path:
        """The checkpoint's folder in `folder`, downloaded unless this checkpoint is already there. The processes of a
        node take turns, and the first one downloads. After a download, deletes older checkpoints in `folder` of which
        the store has a copy.

        progress(): called several times a second while this process downloads or waits

        Raises ValueError if an object is damaged.
        """
        final = folder / name(step)
        folder.mkdir(parents=True, exist_ok=True)
        with turn(folder, progress):
            seal = self.read(step)
            if _holds(final, seal):
                return final
            place = temporary(folder, step)
            self.fetch_files(step, seal.files, place, progress)
            for file, of in seal.files.items():
                if fingerprint(place / file) != list(of):
                    raise ValueError(f"{self.store.url}/{_object(step, file)} is damaged: it has a wrong checksum")
                sync((place / file).parent)
            write_synced(place / TABLE, seal.table)
            write_synced(place / ABOUT, json.dumps(seal.about, indent=1).encode())
            sync(place)
            rename(place, final)
            for number, path in finished(folder).items():
                if number < step and self.is_copy(number, path):  # nothing else deletes it from a node's own disk
                    shutil.rmtree(path, ignore_errors=True)
            return final

    def is_copy(self, step: int, path: Path) -> bool:
        """Whether the folder `path` and the store have the same checkpoint, not two of different runs."""
        try:
            return _holds(path, self.read(step))
        except ValueError as error:
            if isinstance(error, StoreError) and not isinstance(error, Absent):
                raise
            return False

    def fetch_files(
        self, step: int, files: Iterable[str], place: Path, progress: Callable[[], None] = lambda: None
    ) -> None:
        """Downloads files of a checkpoint into the folder `place`."""
        for file in files:
            (place / file).parent.mkdir(parents=True, exist_ok=True)
            self.store.get_file(_object(step, file), place / file, progress)


def here(url: str | None, folder: Path, step: int, progress: Callable[[], None] = lambda: None) -> Path:
    """The folder of a checkpoint on this node's disk, downloaded if the store has it.

    url     URL of the store (`checkpoint.store`); None: there is no store, and the path is returned without a check
    folder  run.dir/checkpoints

    Raises ValueError if the checkpoint is neither in the store nor on the disk, or if an object is damaged.
    """
    path = folder / name(step)
    if url is None:
        return path
    try:
        return StoredCheckpoints(Store(url)).fetch(step, folder, progress)
    except StoreError as error:  # the checkpoint may be on this disk only, or the store may be unreachable
        if (path / ABOUT).is_file():
            return path
        raise ValueError(f"this node's disk has no {path}, and {error}") from None


def steps_in(folder: Path, url: str | None, step: int | None = None) -> list[int]:
    """Numbers of steps of the checkpoints in a folder, oldest first. Adds those in the store if the folder has none, or
    lacks the one of `step` steps. Raises StoreError if the store fails.

    url, folder: as in `here`"""
    present = set(finished(folder))
    if url is not None and not (present if step is None else step in present):
        present |= set(StoredCheckpoints(Store(url)).steps())
    return sorted(present)


def _object(step: int, file: str) -> str:
    return f"{ROOT}/{name(step)}/{file}"


def _seal(step: int) -> str:
    return f"{SEALS}/{name(step)}.json"


def _holds(path: Path, seal: Seal) -> bool:
    """Whether this folder contains the checkpoint of the seal, not a different one with the same number of steps."""
    try:
        same = json.loads((path / ABOUT).read_text()) == seal.about
        return same and all((path / file).stat().st_size == size for file, (size, _) in seal.files.items())
    except (OSError, ValueError):
        return False
