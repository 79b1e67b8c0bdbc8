"""Reads a .jsonl file, even while it grows.

    follower = Follower(run.events)
    follower.new()                      # the records since the last call
    Follower(run.events).whole()        # all records; raises UnreadableFile if the file is damaged

Each byte is read once, because a run of days has 100,000 events and readers poll often. After `undone.cut` has removed
rolled-back steps from the file, the next call returns only the records after the kept ones. Lines that an older
coordinator wrote after those of a newer one are skipped (`wire.terms`).
"""

from __future__ import annotations

import os
import zlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar, overload

import msgspec

from recycle_pp.wire.files import UnreadableFile, open_regular, what_is_wrong
from recycle_pp.wire.records import Samples, Step, Term
from recycle_pp.wire.terms import EARLIER, Terms

from .events.catalog import parse

Record = dict[str, Any]
T = TypeVar("T")

CHECKS: dict[str, Callable[[Any], object]] = {
    "metrics.jsonl": partial(msgspec.convert, type=Step),
    "events.jsonl": parse,
    "samples.jsonl": partial(msgspec.convert, type=Samples),
}
"""File name -> function that raises msgspec.ValidationError if the JSON of a line is not a record of this file"""


class Follower(Generic[T]):
    """Reads the records of a .jsonl file while it grows. Damaged lines are skipped.

    damage: the first damaged line or other defect of the file; None without one"""

    @overload
    def __init__(self: Follower[Record], path: Path, skip: int = 0) -> None: ...
    @overload
    def __init__(self, path: Path, skip: int, parse: Callable[[bytes], tuple[T, int]]) -> None: ...

    def __init__(self, path: Path, skip: int = 0, parse: Any = None) -> None:
        """
        skip:  number of bytes at the beginning of the file to skip
        parse: returns (record, term) of a line, and raises msgspec.MsgspecError if the line is damaged. Default: the
               record is a dict with all keys of the line, checked
        """
        self.damage: UnreadableFile | None = None
        self._path = path
        self._skip = skip
        self._parse: Callable[[bytes], tuple[Any, int]] = parse or partial(record_of, check=CHECKS.get(path.name))
        self._read = 0  # bytes read so far
        self._last = b""  # the last line read
        self._checks = array("L")  # CRC-32 of each line read
        self._terms = Terms()

    def new(self) -> list[T]:
        """The records since the last call; [] without a file. Skips damaged lines, and stores the first one as
        `damage`. A line that a full disk or a crash has cut short does not count as damage."""
        return list(self.each())

    def skip_to_last(self, size: int) -> None:
        """Skips all lines that begin before the last `size` bytes, without reading them. Call it before the first
        read."""
        with suppress(FileNotFoundError, UnreadableFile), open_regular(self._path) as file:
            end = file.seek(0, os.SEEK_END)
            if end > size:
                self._read = file.seek(end - size - 1) + len(file.readline())

    def whole(self) -> list[T]:
        """The same records as `new`.

        Raises:
            UnreadableFile: the file is damaged (`damage`).
        """
        records = self.new()
        if self.damage is not None:
            raise self.damage
        return records

    def each(self) -> Iterator[T]:
        """The same records as `new`, one at a time, because all records of a large file may not fit into memory."""
        with suppress(FileNotFoundError):
            try:
                with open_regular(self._path) as file:
                    self._seek(file)
                    yield from self._records(file)
            except UnreadableFile as error:
                self.damage = error

    def _records(self, file: BinaryIO) -> Iterator[T]:
        for line in file:
            if not line.endswith(b"\n"):
                return
            known = self._read < self._skip
            self._take(line)
            try:
                record, term = self._parse(line)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                if not known and not _torn(line):
                    why = f"line {len(self._checks)}: {what_is_wrong(line, error)}"
                    self.damage = self.damage or UnreadableFile(self._path, why)
                continue
            if self._terms.counts(term) and not known:
                yield record

    def _take(self, line: bytes) -> None:
        self._read += len(line)
        self._last = line
        self._checks.append(zlib.crc32(line))

    def _seek(self, file: BinaryIO) -> None:
        """Seeks to the end of the last line read. If `undone.cut` has removed that line, seeks to the end of the newest
        line that was read and is still there."""
        file.seek(self._read - len(self._last))
        if file.read(len(self._last)) == self._last:
            return
        checks = self._checks
        self._checks = array("L")
        self._read = 0
        self._last = b""
        file.seek(0)
        for line, check in zip(file, checks, strict=False):
            if zlib.crc32(line) != check:
                break
            self._take(line)
        self._skip = min(self._skip, self._read)
        file.seek(self._read)


def term_of(data: Any) -> int:
    """The term in the JSON of a line; EARLIER without one. Raises msgspec.ValidationError if the value is not a
    term."""
    term: int = msgspec.convert(data.get("term", EARLIER) if isinstance(data, dict) else EARLIER, Term)
    return term


def record_of(line: bytes, check: Callable[[Any], object] | None) -> tuple[Record, int]:
    """(record, term) of a line. check: raises msgspec.ValidationError if the data is not a valid record."""
    data = msgspec.json.decode(line)
    if check is not None:
        check(data)
    return msgspec.convert(data, Record), term_of(data)


def _torn(line: bytes) -> bool:
    """Whether a line is incomplete, or zero bytes left by a crashed machine."""
    if not line.strip(b"\0\n"):
        return True
    try:
        msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return line.startswith(b"{")
    return False
