"""The rule of a setting: its meaning, its allowed values, and when it may change.

    lr: float = setting(3e-3, "peak learning rate", above=0)            # a field of a group in settings.py
    width: int = fixed(64, "hidden size H", at_least=1)                 # a field that must not change during a run
    rules(Settings)                                                     # {"optimizer.lr": Rule(...), ...}
    rule.check("optimizer.lr", -1.0)                                    # raises ValueError with one sentence

`checks` compares every setting with its rule. `resume` uses the rules to decide what may change, and `node_settings` to
decide what may differ between nodes. `--help` and the table in docs/configuration.md print the rules.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from enum import StrEnum
from functools import partial
from typing import Any


class Change(StrEnum):
    """When a setting may change. While a job runs, only settings with `Rule.live` may change."""

    NEVER = "never"  # a resumed run keeps the value
    RESUME = "resume"  # a resume takes the value from its command line, or else from the run's config.yaml
    START = "start"  # the value belongs to a single start, so a resume does not take it from config.yaml


@dataclass(frozen=True)
class Rule:
    """The rule of one setting.

    text      the meaning and unit, for users
    default   the value if no configuration file sets one
    choices   the allowed values among strings, true, false and null; does not restrict values of other types
    form      a description of the values that are allowed in addition to the choices
    pattern   regular expression that a string, or each string of a list, must match
    parse     function that raises ValueError if a string is malformed
    at_least, above, at_most, below   bounds of a number, or of each number of a list
    change    when the setting may change
    per_node  whether nodes of one job may have different values
    live      whether it may change while a job runs (`python -m recycle_pp.ctl RUN set`)
    """

    text: str
    default: Any = None
    choices: tuple[Any, ...] = ()
    form: str = ""
    pattern: str = ""
    parse: Callable[[str], object] | None = None
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    change: Change = Change.RESUME
    per_node: bool = False
    live: bool = False

    @property
    def allowed(self) -> str:
        """The allowed values in words; "" if the type alone restricts them."""
        bounds = {"at least": self.at_least, "above": self.above, "at most": self.at_most, "below": self.below}
        parts = [f"{words} {bound:g}" for words, bound in bounds.items() if bound is not None]
        if self.choices and self.form:
            return f"{', '.join(map(shown, self.choices))} or {self.form}"
        if self.choices:
            return f"one of {', '.join(map(shown, self.choices))}"
        return self.form or " and ".join(parts)

    def check(self, key: str, value: Any) -> None:
        """Raises ValueError with one sentence if the value is not allowed. The caller has already checked its type."""
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, float) and not math.isfinite(one):
                raise ValueError(f"{key} must be finite, not {one}")
            if isinstance(one, int | float) and not isinstance(one, bool) and not self._within(one):
                raise ValueError(f"{key} must be {self.allowed}, not {one}")
            if isinstance(one, str) and (self.pattern or self.parse) and one not in self.choices:
                self._check_text(key, one)
            elif self.choices and isinstance(one, str | bool | None) and one not in self.choices:
                raise ValueError(f"{key} must be {self.allowed}, not {shown(one)}")

    def _within(self, number: float) -> bool:
        return (
            (self.at_least is None or number >= self.at_least)
            and (self.above is None or number > self.above)
            and (self.at_most is None or number <= self.at_most)
            and (self.below is None or number < self.below)
        )

    def _check_text(self, key: str, text: str) -> None:
        if self.pattern and not re.fullmatch(self.pattern, text):
            raise ValueError(f"{key} must be {self.allowed}, not {text!r}")
        try:
            if self.parse:
                self.parse(text)
        except ValueError as error:
            raise ValueError(f"{key} must be {self.allowed}: {error}") from None


def setting(default: Any, text: str, **rule: Any) -> Any:
    """A field of a dataclass, with its `Rule`.

    default  a value, or a function that returns one
    rule     the other fields of the `Rule`
    """
    if callable(default):
        return field(default_factory=default, metadata={"rule": Rule(text, default(), **rule)})
    return field(default=default, metadata={"rule": Rule(text, default, **rule)})


fixed = partial(setting, change=Change.NEVER)
"""A setting that stays the same for the whole run."""


def rules(cls: type) -> dict[str, Rule]:
    """Key -> rule, for all settings in a dataclass of groups.

    A key has the form "optimizer.lr". The key of a setting outside all groups is its name.
    """
    found: dict[str, Rule] = {}
    for one in fields(cls):
        group = _group(one)
        found |= {one.name: one.metadata["rule"]} if group is None else _prefixed(one.name, rules(group))
    return found


def _group(one: Field[Any]) -> type | None:
    made = one.default_factory
    return made if made is not MISSING and isinstance(made, type) and is_dataclass(made) else None


def _prefixed(group: str, of: dict[str, Rule]) -> dict[str, Rule]:
    return {f"{group}.{name}": rule for name, rule in of.items()}


def shown(value: Any) -> str:
    """A value as users write it on the command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
