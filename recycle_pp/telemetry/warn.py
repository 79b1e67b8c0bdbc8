"""Warnings on standard error that never block the job.

warn_once("runs/mine/metrics.jsonl cannot be written: No space left on device")
warn("metrics.jsonl lacks 15 lines: the disk rejected them")
"""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import cache

from .background import Background

FLUSH_SECONDS = 0.1
_warnings = Background("warnings")


@cache
def warn_once(sentence: str) -> None:
    """Prints the sentence once per process. Blocks for at most FLUSH_SECONDS if standard error is not read."""
    warn(f"{sentence}; the job continues without it")
    _warnings.flush(FLUSH_SECONDS)


def warn(sentence: str) -> None:
    """Prints the sentence in a thread."""
    _warnings(_print, sentence)


def flush(seconds: float) -> bool:
    """Blocks until all warnings are printed (True), or for `seconds` (False)."""
    return _warnings.flush(seconds)


def _print(sentence: str) -> None:
    with suppress(OSError, ValueError):
        print(f"recycle_pp: {sentence}", file=sys.stderr, flush=True)
