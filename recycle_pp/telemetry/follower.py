"""follower = Follower(run.events); follower.new()     # the records that a .jsonl file has got since the last call

Reads each byte once: a run of days has events by the hundred thousand, and whoever follows it looks often.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any


class Follower:
    def __init__(self, path: Path, skip: int = 0):
        """skip: bytes at its begin that are known."""
        self._path, self._read = path, skip

    def new(self) -> list[dict[str, Any]]:
        """[] while there is no file. A line that a full disk or a dying machine left unfinished is left out."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        records = []
        for line in whole.splitlines():
            if line.endswith(b"}"):
                with suppress(ValueError):
                    records.append(json.loads(line))
        return records
