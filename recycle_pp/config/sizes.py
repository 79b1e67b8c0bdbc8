"""Parses and prints sizes in bytes, in the notation of users.

parse_size("16GB") == 16e9; parse_size("80 GiB"); parse_size("2e9")      # raises ValueError for anything else
format_size(6_000_000_000) == "6 GB"
"""

from __future__ import annotations

import math
import re

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_FACTORS = {"": 1.0} | {unit.lower(): 1e3**n for n, unit in enumerate(_UNITS)}
_FACTORS |= {f"{unit[0].lower()}ib": 1024.0**n for n, unit in enumerate(_UNITS) if n}
_FACTORS |= {unit[0].lower(): 1e3**n for n, unit in enumerate(_UNITS) if n}


def parse_size(text: str, flag: str = "") -> float:
    """The size in bytes. Raises ValueError if `text` is not a size.

    text  a number, and optionally a unit in upper or lower case: decimal (kB, MB, GB, TB, or k, M, G, T) or binary
          (KiB, MiB, GiB, TiB)
    flag  name of the option; the error message starts with it
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    factor = _FACTORS.get(match[2]) if match else None
    try:
        size = float(match[1]) * factor if match and factor else math.nan
    except ValueError:
        size = math.nan
    if not (math.isfinite(size) and size > 0):
        raise ValueError(f"{flag + ': ' if flag else ''}{text!r} is not a size above 0, like 16GB, 512MiB or 2e9")
    return size


def format_size(size: float) -> str:
    """The size with three digits, in the largest decimal unit that is not larger than the size."""
    power = min(len(_UNITS) - 1, max(0, int(math.log10(size) / 3 + 1e-9))) if size >= 1 else 0
    return f"{size / 1e3**power:.3g} {_UNITS[power]}"
