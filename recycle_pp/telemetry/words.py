"""Phrases that several messages for users share.

plural(3, "step")        # "3 steps"
when(20, steps=60)       # "step 20"
"""

from __future__ import annotations

from collections.abc import Iterable


def plural(count: int, noun: str) -> str:
    """A number with its noun: "3 steps", "1 step"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def names(of: Iterable[object], most: int = 6, between: str = ", ") -> str:
    """The names as text, shortened: "0.0, 1.0 and 14 more"."""
    texts = [str(name) for name in of]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return between.join(texts[:most]) + more


def when(step: int, steps: int) -> str:
    """The position of the run in words: "step 20", or "after step 59" when all 60 steps are done.

    step: the current or next step; counted from 0, as in files and flags
    steps: length of the whole run
    """
    return f"step {step}" if step < steps else f"after step {steps - 1}"
