"""The checkpoint with the lowest validation loss.

best(run.metrics, finished(run.checkpoints))     # 40, or None if none of these checkpoints was validated
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def best(metrics: Path, steps: Iterable[int]) -> int | None:
    """The number of steps in the best checkpoint; None if none was validated.

    A checkpoint of N steps was validated if the line of step N - 1 has a finite val_loss.

    metrics: metrics.jsonl, which may be missing
    steps: the checkpoints to choose from, each given by its number of steps"""
    of = losses(metrics)
    known = {step: of[step] for step in steps if math.isfinite(of.get(step, math.nan))}
    return min(known, key=known.__getitem__, default=None)


def losses(metrics: Path) -> dict[int, float]:
    """Number of steps -> validation loss after these steps. metrics: see `best`"""
    known: dict[int, float] = {}
    with suppress(FileNotFoundError), metrics.open("rb") as file:
        for line in file:
            if b'"val_loss"' in line:
                with suppress(ValueError, TypeError, KeyError):  # a line cut by a crash
                    record = json.loads(line)
                    known[record["step"] + 1] = float(record["val_loss"])
    return known
