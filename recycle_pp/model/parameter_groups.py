"""Rejects `optimizer.groups` with a pattern that matches no parameter of the whole model.

refuse_unmatched(settings.optimizer, names)       # ValueError: one sentence, with names that are near
"""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from fnmatch import fnmatchcase

from recycle_pp.config.settings import Optimizer

SHOWN = 5  # parameter names in the message


def refuse_unmatched(optimizer: Optimizer, names: Collection[str]) -> None:
    """ValueError, one sentence, for the first such pattern. names: all parameters of the whole model."""
    for group in optimizer.groups or ():
        pattern = group.partition(":")[0]
        if not any(fnmatchcase(name, pattern) for name in names):
            near = get_close_matches(pattern, names, SHOWN, cutoff=0.3) or list(names)[:SHOWN]
            raise ValueError(f"optimizer.groups: {pattern} matches no parameter; near names: {', '.join(near)}")
