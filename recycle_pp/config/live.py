"""Checks new values for settings of a running job.

    values = checked(settings, {"checkpoint.every": 50})      # raises ValueError with one sentence for the user
    settings = settings.with_values(values)

The rule of a setting (`setting.py`) states whether it may change while a job runs (`live`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from .checks import check_ranges, check_values
from .loading import flat, load, nested
from .setting import rules
from .settings import Settings

_RULES = rules(Settings)
LIVE = [key for key, rule in _RULES.items() if rule.live]


def checked(settings: Settings, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, converted to the types of their settings.

    settings  the settings of the running job
    values    key -> new value

    Raises ValueError if a key may not change while the job runs, or if a value is not allowed.
    """
    for key in values:
        if key in _RULES and key not in LIVE:
            raise ValueError(f"{key} cannot change while the job runs; these keys can: {', '.join(LIVE)}")
        load(nested({key: values[key]}))  # rejects unknown keys, even inside a setting, such as checkpoint.every.steps
    changed: Settings = load(nested(flat(asdict(settings)) | dict(values)))
    check_ranges(changed)
    check_values(changed)
    now = flat(asdict(changed))
    return {key: now[key] for key in values}
