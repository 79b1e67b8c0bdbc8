"""Checkpoints in a store of objects (`checkpoint.store`). Imports no torch.

    stored = StoredCheckpoints(Store("s3://bucket/runs/mine"))
    files = stored.upload(20, path)               # a part on this node's disk; {"stage-0-0-ab12/x": [size, crc]}
    stored.seal(20, about, files, table)          # True: the checkpoint is whole now
    stored.prune(keep=2)
    stored.steps()                                # whole checkpoints, oldest first
    stored.damage(20)                             # None, or what is missing
    stored.fetch(20, folder)                      # folder/step-000020, as `checkpoint.finish` leaves it
    here(url, folder, 20)                         # the same, also if only the disk has it

Objects below the store's URL:

    checkpoints/step-000020/stage-0-0-ab12cd34/...    the parts, under names that no other save has
    checkpoints/sealed/step-000020.json               the seal: about.json, and torch's table of contents
    checkpoints/newest                                the number of steps in the newest whole checkpoint

A seal is put only if it is absent, after all parts. So of two members that seal, one succeeds, and its parts are never
changed or deleted by the other. `newest` is for stores whose listings lack objects that are seconds old.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from recycle_pp.storage.store import Absent, Store, StoreError
from recycle_pp.telemetry.checkpoint_folders import name, step_of, temporary

from .checksum import ABOUT, TABLE, fingerprint
from .replacing import rename, sync, write_synced

ROOT = "checkpoints"
SEALS = f"{ROOT}/sealed"
NEWEST = f"{ROOT}/newest"
Files = Mapping[str, Sequence[int]]  # path in the checkpoint -> [size in bytes, CRC-32]


class Seal(msgspec.Struct):
    """
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
    """The methods raise StoreError."""

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
        """Whether this call made the checkpoint whole. False: another member has sealed other parts.

        about  JSON for a resume, see `checkpoint.describe`
        files  fingerprints of the files with tensors
        table  the file with torch's table of contents of all parts
        """
        described = {"step": step, **about, "files": {TABLE: fingerprint(table), **files}}
        seal = msgspec.json.encode(Seal(step, files, described, table.read_bytes()))
        if not self.store.put_if_absent(_seal(step), seal):
            if self.damage(step) is None:
                return False
            self.store.delete([_seal(step)])  # the job has restarted from an older checkpoint
            if not self.store.put_if_absent(_seal(step), seal):
                return False
        self.store.put(NEWEST, str(step).encode())
        return True

    def prune(self, keep: int) -> None:
        """Deletes all whole checkpoints but the newest `keep`, and parts of others that are older than the newest."""
        steps = self.steps()
        kept = set(steps[-keep:])
        self.store.delete(_seal(step) for step in steps if step not in kept)
        found = {step for folder in self.store.folders(ROOT) if (step := step_of(folder)) is not None}
        for step in sorted(found - kept):
            if step < max(kept, default=0) and not self.is_sealed(step):  # a listing may lack its seal
                self.store.delete(self.store.list(f"{ROOT}/{name(step)}"))

    def is_sealed(self, step: int) -> bool:
        """Whether there is a whole checkpoint with this number of steps."""
        try:
            return self.store.size(_seal(step)) > 0
        except Absent:
            return False

    def read(self, step: int) -> Seal:
        """Raises Absent if there is no whole checkpoint with this number of steps; ValueError: its seal is damaged."""
        content = self.store.get(_seal(step))
        try:
            seal = msgspec.json.decode(content, type=Seal)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{self.store.url}/{_seal(step)} is damaged: {error}") from None
        if seal.step != step:
            raise ValueError(f"{self.store.url}/{_seal(step)} is the seal of another checkpoint")
        return seal

    def damage(self, step: int) -> str | None:
        """Describes what is missing of a whole checkpoint; None if nothing is. Compares sizes; `fetch` compares
        checksums."""
        try:
            for file, (size, _) in self.read(step).files.items():
                if (now := self.store.size(_object(step, file))) != size:
                    return f"{self.store.url}/{_object(step, file)} has {now} bytes, expected {size}"
        except (Absent, ValueError) as error:
            return str(error)
        return None

    def fetch(self, step: int, folder: Path, progress: Callable[[], None] = lambda: None) -> Path:
        """The checkpoint's folder in `folder`, downloaded unless this checkpoint is already there. Processes of a node
        take turns, and the first one downloads.

        progress: called several times a second while this process downloads or waits.
        Raises ValueError if an object is damaged.
        """
        final = folder / name(step)
        folder.mkdir(parents=True, exist_ok=True)
        with _turn(folder, progress):
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
            return rename(place, final)

    def fetch_files(
        self, step: int, files: Iterable[str], place: Path, progress: Callable[[], None] = lambda: None
    ) -> None:
        """Downloads files of a checkpoint into the folder `place`."""
        for file in files:
            (place / file).parent.mkdir(parents=True, exist_ok=True)
            self.store.get_file(_object(step, file), place / file, progress)


def here(url: str | None, folder: Path, step: int, progress: Callable[[], None] = lambda: None) -> Path:
    """The folder of a checkpoint on this node's disk, downloaded if the store has it.

    url     of the store, `checkpoint.store`, or None
    folder  run.dir/checkpoints
    Raises ValueError if it is neither in the store nor on the disk, or if an object is damaged.
    """
    path = folder / name(step)
    if url is None:
        return path
    try:
        return StoredCheckpoints(Store(url)).fetch(step, folder, progress)
    except StoreError as error:  # the newest checkpoint may be on the disk only
        if (path / ABOUT).is_file():
            return path
        raise ValueError(f"this node's disk has no {path}, and {error}") from None


def _object(step: int, file: str) -> str:
    return f"{ROOT}/{name(step)}/{file}"


def _seal(step: int) -> str:
    return f"{SEALS}/{name(step)}.json"


def _holds(path: Path, seal: Seal) -> bool:
    """Whether this folder has the checkpoint of the seal, and not another one with the same number of steps."""
    try:
        same = json.loads((path / ABOUT).read_text()) == seal.about
        return same and all((path / file).stat().st_size == size for file, (size, _) in seal.files.items())
    except (OSError, ValueError):
        return False


@contextmanager
def _turn(folder: Path, progress: Callable[[], None]) -> Iterator[None]:
    """Holds the lock of this folder. The lock ends with the process."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress()
                time.sleep(0.1)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(descriptor)
