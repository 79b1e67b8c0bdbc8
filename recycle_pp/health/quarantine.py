"""Reads and writes quarantine.json in the run folder: the GPUs on which no worker may start, by UUID.

read(run.quarantine)                            # {"GPU-...": Entry(...)}
add(run.quarantine, "GPU-...", entry)           # only on the coordinator; blocks on the disk
lift(run.quarantine, "GPU-...")                 # for python -m recycle_pp.health --clear UUID RUN

The file survives restarts of the job.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.wire.files import decode
from recycle_pp.wire.files import read as read_file
from recycle_pp.wire.records import Count, Seconds


class Entry(msgspec.Struct, frozen=True):
    """A GPU in quarantine.

    worker  the worker that used the GPU
    host    the host of the GPU
    detail  why the GPU must not be used again
    time    time of the entry, in seconds since 1970
    step    step that was in progress
    """

    worker: str
    host: str
    detail: str
    time: Seconds
    step: Count


def read(path: Path) -> dict[str, Entry]:
    """UUID -> entry; empty if there is no file. Raises UnreadableFile if the file is damaged."""
    try:
        return decode(path, read_file(path), dict[str, Entry])
    except FileNotFoundError:
        return {}


def add(path: Path, uuid: str, entry: Entry) -> None:
    """Adds a GPU, unless it is in quarantine already. Only the coordinator calls this, so that no two processes add at
    the same time. Raises OSError or UnreadableFile."""
    _write(path, {uuid: entry} | read(path))


def lift(path: Path, uuid: str) -> None:
    """Removes a GPU. Raises ValueError if it is not in quarantine, or if the file cannot be read or written."""
    entries = read(path)
    if uuid not in entries:
        known = f"; the GPUs in it are {', '.join(entries)}" if entries else ""
        raise ValueError(f"{uuid} is not in {path}{known}")
    del entries[uuid]
    try:
        _write(path, entries)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from error


def _write(path: Path, entries: dict[str, Entry]) -> None:
    RunFolder.write_text(path, msgspec.json.format(msgspec.json.encode(entries), indent=1).decode() + "\n")
