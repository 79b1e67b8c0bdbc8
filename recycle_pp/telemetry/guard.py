"""Guards methods of telemetry, so that an error in them does not end the job.

@guarded
def measured(self, ...): ...          # returns None after an error

@guarded_returning(dict)
def spans(self, step): ...            # returns {} after an error
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


def guarded(function: Callable[P, None]) -> Callable[P, None]:
    """The function, with a warning instead of an exception: one for each type of exception and source line."""
    return guarded_returning(lambda: None)(function)


def guarded_returning(default: Callable[[], R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Like `guarded`, for a function that returns a value: `default()` after an exception."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def wrapper(*arguments: P.args, **named: P.kwargs) -> R:
            try:
                return function(*arguments, **named)
            except Exception as error:
                _warn(function.__name__, error)
                return default()

        return wrapper

    return decorate


def _warn(name: str, error: Exception) -> None:
    """Omits the exception's message. It may contain a step, and each step would then get a new warning."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    warn_once(f"telemetry failed in {name}: {type(error).__name__} at {Path(place.filename).name}:{place.lineno}")
