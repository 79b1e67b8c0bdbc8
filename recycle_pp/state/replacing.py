"""Puts a finished checkpoint into place: files on disk, then a rename.

write_synced(path, content); sync(folder)     # both return when the content is on disk
rename(place, final)
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path


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


def write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Flushes the entries of `folder` to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
