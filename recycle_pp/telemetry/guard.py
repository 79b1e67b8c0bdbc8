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
    """Decorates a function so that it prints a warning instead of raising an exception. Prints one warning for each
    type of exception and source line."""
    return guarded_returning(lambda: None)(function)


def guarded_returning(default: Callable[[], R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Like `guarded`, for a function that returns a value. After an exception it returns `default()`."""

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
    """Prints the warning without the exception's message. A message may contain the number of a step, and would then
    cause a new warning in each step."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    warn_once(f"telemetry failed in {name}: {type(error).__name__} at {Path(place.filename).name}:{place.lineno}")
