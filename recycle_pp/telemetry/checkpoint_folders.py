"""The folders of a run's checkpoints, by name.

    name(20)                # "step-000020": the state after steps 0 to 19
    finished(folder)        # {20: folder / "step-000020"}, by steps done, oldest first
    unfinished(folder)      # {folder / "step-000030.tmp": 30}: incomplete saves

Anything else in the folder belongs to the user (a link, or a copy `step-000010.bak`) and is never read, moved or
deleted.
"""

from __future__ import annotations

import re
from pathlib import Path

_FINISHED = re.compile(r"step-(\d{6,})")
_UNFINISHED = re.compile(r"step-(\d{6,})(\.replaced)?\.tmp")


def name(step: int) -> str:
    return f"step-{step:06d}"


def finished(folder: Path) -> dict[int, Path]:
    """Finished checkpoints, whether whole or damaged."""
    found = {int(match[1]): path for path, match in _matching(folder, _FINISHED) if path.name == name(int(match[1]))}
    return dict(sorted(found.items()))


def unfinished(folder: Path) -> dict[Path, int]:
    """Folders of current or killed saves, and a checkpoint that a newer one has replaced."""
    return {path: int(match[1]) for path, match in _matching(folder, _UNFINISHED)}


def _matching(folder: Path, pattern: re.Pattern[str]) -> list[tuple[Path, re.Match[str]]]:
    if not folder.is_dir():
        return []
    return [(path, match) for path in folder.iterdir() if (match := pattern.fullmatch(path.name)) and path.is_dir()]
