"""Parses and prints sizes in bytes, in the notation of users.

parse_size("16GB") == 16e9; parse_size("80 GiB"); parse_size("2e9")      # ValueError for anything else
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
    """A size in bytes. The units are powers of 1000 (kB, MB, GB, TB, also k, M, G, T) or of 1024 (KiB, MiB, GiB, TiB),
    in upper or lower case. ValueError if `text` is not a size.

    flag: the option's name, with which the error message starts
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
