"""The GPUs on which no worker may start: quarantine.json in the run folder, by UUID. It survives restarts of the job.

read(run.quarantine)                            # {"GPU-...": Entry(...)}; UnreadableFile
add(run.quarantine, "GPU-...", entry)           # the coordinator; blocks on the disk
lift(run.quarantine, "GPU-...")                 # a person: python -m recycle_pp.health --clear UUID RUN
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.wire.files import decode
from recycle_pp.wire.files import read as read_file
from recycle_pp.wire.records import Count, Seconds


class Entry(msgspec.Struct, frozen=True):
    """worker, host: where the GPU was used. detail: why it must not be used again. time: seconds since 1970."""

    worker: str
    host: str
    detail: str
    time: Seconds
    step: Count


def read(path: Path) -> dict[str, Entry]:
    """Raises UnreadableFile if the file is damaged."""
    try:
        return decode(path, read_file(path), dict[str, Entry])
    except FileNotFoundError:
        return {}


def add(path: Path, uuid: str, entry: Entry) -> None:
    """Only the coordinator adds, so that no two writers meet. Raises OSError and UnreadableFile."""
    _write(path, {uuid: entry} | read(path))


def lift(path: Path, uuid: str) -> None:
    """ValueError if this GPU is not in quarantine, or the file cannot be read or written."""
    entries = read(path)
    if uuid not in entries:
        known = f"; those in it: {', '.join(entries)}" if entries else ""
        raise ValueError(f"{path} does not have {uuid}{known}")
    del entries[uuid]
    try:
        _write(path, entries)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from error


def _write(path: Path, entries: dict[str, Entry]) -> None:
    RunFolder.write_text(path, msgspec.json.format(msgspec.json.encode(entries), indent=1).decode() + "\n")
