"""The folders of a run's checkpoints, by name.

    name(20)                # "step-000020": the state after steps 0 to 19
    step_of("step-000020")  # 20
    finished(folder)        # {20: folder / "step-000020"}, by steps done, oldest first
    unfinished(folder)      # {folder / "step-000030.tmp": 30}: incomplete saves
    temporary(folder, 30)   # folder / "step-000030.tmp"
    writer("stage-2-1-0123abcd")    # (1, 2): worker 1.2 wrote this part

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


def step_of(text: str) -> int | None:
    """The number of steps in the checkpoint with this name; None if `text` is not the name of a checkpoint."""
    match = _FINISHED.fullmatch(text)
    return int(match[1]) if match and text == name(int(match[1])) else None


def temporary(folder: str | Path, step: int) -> Path:
    """The folder that holds the parts of a checkpoint until it is finished."""
    return Path(folder) / f"{name(step)}.tmp"


def writer(part: str) -> tuple[int, int]:
    """The pipeline and the stage of the worker that wrote this part of a checkpoint."""
    _, stage, pipeline, _ = part.split("-")
    return int(pipeline), int(stage)


def finished(folder: Path) -> dict[int, Path]:
    """Finished checkpoints, whether whole or damaged."""
    found = {step: path for path, _ in _matching(folder, _FINISHED) if (step := step_of(path.name)) is not None}
    return dict(sorted(found.items()))


def unfinished(folder: Path) -> dict[Path, int]:
    """The folders of incomplete saves, running or killed, and of checkpoints that another save of the same step has
    replaced. Each with its number of steps."""
    return {path: int(match[1]) for path, match in _matching(folder, _UNFINISHED)}


def _matching(folder: Path, pattern: re.Pattern[str]) -> list[tuple[Path, re.Match[str]]]:
    if not folder.is_dir():
        return []
    return [(path, match) for path in folder.iterdir() if (match := pattern.fullmatch(path.name)) and _is_dir(path)]


def _is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # whoever reads the folder will see the error
        return True
