"""Phrases that several messages for users share.

plural(3, "step")        # "3 steps"
when(20, steps=60)       # "step 20"
"""

from __future__ import annotations


def plural(count: int, noun: str) -> str:
    """A number with its noun: "3 steps", "1 step"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def when(step: int, steps: int) -> str:
    """The position of the run in words: "step 20", or "after step 59" when all 60 steps are done.

    step: the current or next step; counted from 0, as in files and flags
    steps: length of the whole run
    """
    return f"step {step}" if step < steps else f"after step {steps - 1}"
