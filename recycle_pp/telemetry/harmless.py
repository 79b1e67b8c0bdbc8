"""Telemetry decides nothing, so a mistake in it ends nothing: it is said once, and the job goes on without.

@harmless
def measured(self, ...): ...          # returns None where it fails

@harmless_but(dict)
def spans(self, step): ...            # returns {} where it fails
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from .warn import warn_once

P = ParamSpec("P")
R = TypeVar("R")


def harmless(function: Callable[P, None]) -> Callable[P, None]:
    """The function, but what it raises is said once for each kind of error and place, on standard error."""
    return harmless_but(lambda: None)(function)


def harmless_but(otherwise: Callable[[], R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """`harmless` for a function whose value is needed: where it fails, that of `otherwise()`."""

    def guard(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def guarded(*arguments: P.args, **named: P.kwargs) -> R:
            try:
                return function(*arguments, **named)
            except Exception as error:
                _say(function.__name__, error)
                return otherwise()

        return guarded

    return guard


def _say(name: str, error: Exception) -> None:
    """Without the error's own words, which may name a step: each would be said anew."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    warn_once(f"telemetry failed in {name}: {type(error).__name__} at {Path(place.filename).name}:{place.lineno}")
