"""Builds settings from plain data, for instance from a JSON or YAML file.

    settings = load({"run": {"steps": 100}})   # raises ValueError, which names the key and the allowed types
    load(known(data))                          # ignores keys that this version does not have

This module checks keys and types; `checks` validates values.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from .setting import rules, shown
from .settings import FAULTS, Settings

LARGEST = 10**18  # largest absolute value of a whole number

Group = TypeVar("Group")


def load(data: Mapping[str, Any], cls: type[Group] = Settings, prefix: str = "") -> Group:  # type: ignore[assignment]
    """A dataclass built from nested plain data. Absent keys keep their defaults.

    prefix: text before the keys in error messages

    Raises ValueError for an unknown key or a value of the wrong type.
    """
    hints = get_type_hints(cls)
    values = {}
    for key, value in data.items():
        if key not in hints:
            raise ValueError(_unknown(prefix + str(key), [prefix + name for name in hints]))
        if is_dataclass(hints[key]):
            if not isinstance(value, Mapping):
                raise ValueError(
                    f"{prefix}{key} is a group ({', '.join(get_type_hints(hints[key]))}), not {_shown(value)}"
                )
            values[key] = load(value, hints[key], f"{prefix}{key}.")
        elif key in FAULTS and not prefix:
            values[key] = _fault_texts(key, value)
        else:
            values[key] = _typed(prefix + key, value, hints[key])
    return cls(**values)


def known(data: Mapping[str, Any], cls: Any = Settings) -> dict[str, Any]:
    """`data` without the keys that this version does not have, for runs that a different version started."""
    groups = {name: hint for name, hint in get_type_hints(cls).items() if name in data}
    return {
        name: known(data[name], hint) if is_dataclass(hint) and isinstance(data[name], Mapping) else data[name]
        for name, hint in groups.items()
    }


def flat(data: Mapping[str, Any]) -> dict[str, Any]:
    """The data without nesting: {"run": {"steps": 3}} becomes {"run.steps": 3}."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        found |= {f"{key}.{k}": v for k, v in flat(value).items()} if isinstance(value, Mapping) else {key: value}
    return found


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `flat`."""
    data: dict[str, Any] = {}
    for key, value in values.items():
        group, dot, name = key.partition(".")
        if dot:
            data.setdefault(group, {})[name] = value
        else:
            data[key] = value
    return {key: nested(value) if isinstance(value, dict) else value for key, value in data.items()}


def _typed(key: str, value: Any, hint: Any) -> Any:
    allowed = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if any(isinstance(one, int) and abs(one) > LARGEST for one in (value if isinstance(value, list) else [value])):
        raise ValueError(f"{key} must be at most {LARGEST}")
    for kind in allowed:
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if get_origin(kind) is list:
            part = get_args(kind)[0]
            if isinstance(value, list) and part is float:
                value = [float(one) if type(one) is int else one for one in value]
            if isinstance(value, list) and all(type(one) is part for one in value):
                return value
        elif type(value) is kind:
            return value
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", NoneType: "null"}
    words |= {list[int]: "a list of whole numbers", list[float]: "a list of numbers", list[str]: "a list of strings"}
    rule = rules(Settings).get(key)
    expected = rule.allowed if rule and rule.choices else " or ".join(words[kind] for kind in allowed)
    raise ValueError(f"{key} must be {expected}, not {_shown(value)}")


def _fault_texts(key: str, value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    for item in values:
        if isinstance(item, int | float) and not isinstance(item, bool) and abs(item) < LARGEST:
            step, rest = divmod(round(item, 6), 60)  # YAML 1.1 parses a:b as 60 a + b
            guess = f"{int(step)}:{round(rest, 6):g}"
            raise ValueError(
                f"{key} is the number {item}: YAML reads an unquoted 20:1.2 as a base-60 number; "
                f'put it in quotes, {key}: "{guess if "." in guess else "20:1.2"}"'
            )
        if not isinstance(item, str):
            raise ValueError(f"{key} must be STEP:D.S or a list of such, for instance 20:1.2, not {_shown(item)}")
    return values


def _unknown(key: str, known: list[str]) -> str:
    names = {name: [name] for name in known}
    if "." not in key:  # the group is missing
        for one in rules(Settings):
            names.setdefault(one.rpartition(".")[2], []).append(one)
    near = difflib.get_close_matches(key, names, n=1)
    hint = f"did you mean {' or '.join(names[near[0]])}?" if near else f"allowed: {', '.join(known)}"
    return f"{key} is not a configuration key; {hint}"


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str | list | dict) else shown(value)
