"""Parses and prints durations in the notation of users.

parse_seconds("500ms", "--repair") == 0.5; parse_seconds("2h", "--repair")      # raises ValueError for anything else
format_seconds(5400) == "1.5 h"
"""

from __future__ import annotations

import re

_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_seconds(text: str, flag: str) -> float:
    """The duration in seconds. Raises ValueError if `text` is not a duration above 0.

    text  a number and a unit (ms, s, m, h or d); without a unit, seconds
    flag  name of the option; the error message starts with it
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)?", text)
    seconds = float(match[1]) * _UNITS[match[2] or "s"] if match else 0.0
    if seconds <= 0:
        raise ValueError(f"{flag} must be a time above 0 like 500ms, 5s, 2m or 3h, not {text!r}")
    return seconds


def format_seconds(seconds: float) -> str:
    """The duration with three digits, in the largest unit that is not longer than the duration."""
    name = next((unit for unit in reversed(_UNITS) if seconds >= _UNITS[unit]), "ms")
    return f"{seconds / _UNITS[name]:.3g} {'min' if name == 'm' else name}"
