"""Reads a .jsonl file while it grows.

    follower = Follower(run.events)
    follower.new()                      # the records since the last call

Each byte is read once: a run of days has 100,000 events, and readers poll often. After undone steps were cut from the
file (`undone.cut`), the next call returns only the records behind the kept ones. Lines that an older coordinator wrote
after those of a newer one are skipped (`wire.terms`).
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from recycle_pp.wire.files import UnreadableFile, open_regular, what_is_wrong
from recycle_pp.wire.records import Samples, Step
from recycle_pp.wire.terms import EARLIER, Terms

from .events.catalog import parse

CHECKS: dict[str, Callable[[Any], object]] = {
    "metrics.jsonl": partial(msgspec.convert, type=Step),
    "events.jsonl": parse,
    "samples.jsonl": partial(msgspec.convert, type=Samples),
}
"""Raise msgspec.ValidationError if a line of the file is not a record"""


class Follower:
    """damage: the first line that is not a record, or another defect of the file, or None. Such lines are skipped."""

    def __init__(self, path: Path, skip: int = 0):
        """skip: number of bytes at the beginning of the file whose records are not returned."""
        self.damage: UnreadableFile | None = None
        self._path, self._skip = path, skip
        self._read = 0  # bytes
        self._last = b""  # the last line read
        self._checks = array("L")  # CRC-32 of each line read
        self._terms = Terms()

    def new(self) -> list[dict[str, Any]]:
        """The records since the last call; [] without a file. Lines cut short by a full disk or a crash are skipped."""
        try:
            with open_regular(self._path) as file:
                self._seek(file)
                data = file.read()
        except FileNotFoundError:
            return []
        except UnreadableFile as error:
            self.damage = error
            return []
        records = []
        for line in data.split(b"\n")[:-1]:
            known = self._read < self._skip
            self._take(line + b"\n")
            try:
                record = _record(line, CHECKS.get(self._path.name, _any))
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                if not known:
                    why = f"line {len(self._checks)}: {what_is_wrong(line, error)}"
                    self.damage = self.damage or UnreadableFile(self._path, why)
                continue
            if record is not None and self._terms.counts(record.get("term", EARLIER)) and not known:
                records.append(record)
        return records

    def _take(self, line: bytes) -> None:
        self._read += len(line)
        self._last = line
        self._checks.append(zlib.crc32(line))

    def _seek(self, file: BinaryIO) -> None:
        """Seeks to the end of the last line read, or, if that was cut, of the last one that is left."""
        file.seek(self._read - len(self._last))
        if file.read(len(self._last)) == self._last:
            return
        checks, self._checks, self._read, self._last = self._checks, array("L"), 0, b""
        file.seek(0)
        for line, check in zip(file, checks, strict=False):
            if zlib.crc32(line) != check:
                break
            self._take(line)
        self._skip = min(self._skip, self._read)
        file.seek(self._read)


def _any(record: Any) -> None:
    """Accepts the records of other files."""


def _record(line: bytes, check: Callable[[Any], object]) -> dict[str, Any] | None:
    """The checked record of a line. None for an incomplete line, or for zeros that a crashed machine left."""
    try:
        record = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        if line.startswith(b"{") or not line.strip(b"\0"):
            return None
        raise
    check(record)
    return msgspec.convert(record, dict[str, Any])
