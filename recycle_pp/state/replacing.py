"""Puts a finished checkpoint into place: files on disk, then a rename.

write_synced(path, content); sync(folder)     # both return when the content is on disk
rename(place, final)
set_aside(folder / "step-000040")             # renames a damaged checkpoint
delete_unfinished(folder, 60)                 # deletes leftovers of saves before step 60
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from math import inf
from pathlib import Path

from recycle_pp.telemetry.checkpoint_folders import unfinished


def rename(place: Path, final: Path) -> Path:
    """Renames a finished checkpoint from `place` to `final`. If `final` exists, deletes it. This happens if the job has
    restarted from an older checkpoint and repeated the step."""
    replaced = final.with_name(f"{final.name}.replaced.tmp")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    place.rename(final)
    sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def set_aside(final: Path) -> None:
    """Renames a damaged checkpoint to `step-000040.damaged`, or to `step-000040.damaged-2` if this name exists. It is
    then neither read nor deleted."""
    for number in itertools.count(1):
        place = final.with_name(f"{final.name}.damaged{f'-{number}' if number > 1 else ''}")
        if not place.exists():
            final.rename(place)
            return


def delete_unfinished(folder: Path, step: float = inf, spared: Collection[int | None] = ()) -> None:
    """Deletes the folders of unfinished checkpoints of fewer than `step` steps, except those whose steps are in
    `spared`. Ignores errors."""
    with suppress(OSError):
        for path, number in unfinished(folder).items():
            if number < step and number not in spared:
                shutil.rmtree(path, ignore_errors=True)


def write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Flushes a file or the entries of a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
