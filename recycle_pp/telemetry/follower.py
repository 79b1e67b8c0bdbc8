"""follower = Follower(run.events); follower.new()     # the records that a .jsonl file has got since the last call

Reads each byte once: a run of days has events by the hundred thousand, and whoever follows it looks often.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from recycle_pp.wire.files import UnreadableFile, open_regular, what_is_wrong
from recycle_pp.wire.records import LINES


class Follower:
    """damage: the first line that is not a record, or what else is wrong with the file; None if nothing is. Such lines
    are left out."""

    def __init__(self, path: Path, skip: int = 0):
        """skip: bytes at its begin that are known."""
        self.damage: UnreadableFile | None = None
        self._path, self._read, self._lines = path, skip, 0

    def new(self) -> list[dict[str, Any]]:
        """[] while there is no file. A line that a full disk or a dying machine left unfinished is left out."""
        try:
            with open_regular(self._path) as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return []
        except UnreadableFile as error:
            self.damage = error
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        records = []
        for line in whole.splitlines():
            self._lines += 1
            try:
                if (record := _record(line, LINES.get(self._path.name, dict[str, Any]))) is not None:
                    records.append(record)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                why = f"line {self._lines}: {what_is_wrong(line, error)}"
                self.damage = self.damage or UnreadableFile(self._path, why)
        return records


def _record(line: bytes, of: Any) -> dict[str, Any] | None:
    """The record of a whole line, checked; None for the beginning of one, or for zeros that a dead machine left."""
    try:
        record = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        if line.startswith(b"{") or not line.strip(b"\0"):
            return None
        raise
    msgspec.convert(record, of)
    return record
