"""The settings file of a run, in YAML: `recycle train run.yaml KEY=VALUE`.

    words, path = split(["run.yaml", "run.steps=100"])    # (["run.steps=100"], "run.yaml"); path is None without a file
    read_run_file(path)                                   # {"optimizer.lr": 0.001, ...}: the keys that the file sets
    commented(settings, ["a comment"])                    # the text of a file with every key, for `recycle init`

A file can set any keys of `Settings`, in their groups. A run's config.yaml is such a file. Values are read as in YAML
1.2: `3e-4` is a number, `20:1.2` and `on` are strings, and only `true` and `false` are booleans.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import yaml

from .loading import flat, load
from .setting import Rule, rules
from .settings import FAULTS, Settings

SUFFIXES = (".yaml", ".yml")


def is_run_file(text: str) -> bool:
    """Whether an argument names a settings file. The file may be missing."""
    return text.endswith(SUFFIXES) and ("=" not in text or Path(text).is_file())


def split(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """Splits a command line into (the arguments that do not name a settings file, the path of that file or None).

    Raises ValueError if several files are named.
    """
    found = [text for text in arguments if is_run_file(text)]
    if len(found) > 1:
        raise ValueError(f"only one settings file is allowed, not {' and '.join(found)}")
    return [text for text in arguments if text not in found], found[0] if found else None


def read_run_file(path: str, resolve: bool = True) -> dict[str, Any]:
    """The keys that the file sets, as `flat` returns them.

    resolve: whether to replace interpolations, ${...}

    Raises ValueError if the file is missing or not YAML, a key is unknown or given twice, or a value has the wrong type
    or range. The sentence names the file and, if possible, the line.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    node, parsed = _parsed(path)
    lines = _lines(path, node)
    try:
        data: Any = OmegaConf.to_container(OmegaConf.create(parsed), resolve=resolve)
        keys = flat(data)
        load(data)
        for key, rule in rules(Settings).items():
            if key in keys and key not in FAULTS:
                rule.check(key, keys[key])
    except OmegaConfBaseException as error:
        raise ValueError(f"{path}: {str(error).splitlines()[0]}") from None
    except ValueError as error:  # the sentence of the error begins with the key
        raise ValueError(f"{_at(path, lines.get(str(error).split()[0]))}: {error}") from None
    return keys


def commented(settings: Settings, comment: Sequence[str]) -> str:
    """The text of a file with every key of `settings`, each below its meaning and its allowed values.

    comment: lines for the top of the file
    """
    top = ["Settings of a run: recycle train FILE [KEY=VALUE ...]", *comment]
    return "\n".join([*(f"# {line}".rstrip() for line in top), *_described(asdict(settings), rules(Settings))]) + "\n"


def _described(data: Mapping[str, Any], known: Mapping[str, Rule], prefix: str = "") -> Iterator[str]:
    """Lines with each key below its comment. Keys in a group are indented."""
    indent = "  " * prefix.count(".")
    for name, value in data.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from ("", f"{indent}{name}:", *_described(value, known, f"{key}."))
            continue
        about = f"{known[key].text} ({known[key].allowed})" if known[key].allowed else known[key].text
        yield from [] if prefix else [""]
        yield from textwrap.wrap(about, 100, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        text = yaml.safe_dump([value], default_flow_style=True, width=10**6, allow_unicode=True)
        yield f"{indent}{name}: {text.strip()[1:-1]}"


class _Loader(yaml.SafeLoader):
    """Reads plain scalars as in YAML 1.2. PyYAML itself follows YAML 1.1, in which 3e-4 is a string."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)


def _parsed(path: str) -> tuple[yaml.Node, dict[str, Any]]:
    """The root node of the file and its data."""
    try:
        text = Path(path).read_text("utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file; recycle init {path} writes one") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} cannot be read: it is not text") from None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        data = None if node is None else loader.construct_document(node)
    except RecursionError:
        raise ValueError(f"{path} cannot be read: it is nested too deeply") from None
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = None if mark is None else mark.line + 1
        raise ValueError(f"{_at(path, line)}: it is not YAML ({problem or ' '.join(str(error).split())})") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: it has no settings; it must contain KEY: VALUE in groups, as recycle init writes it")
    return node, data


def _lines(path: str, node: yaml.Node, prefix: str = "") -> dict[str, int]:
    """Key -> its line number. Raises ValueError if a key is given twice or is not a string."""
    found: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.tag != "tag:yaml.org,2002:str":
            raise ValueError(f"{_at(path, line)}: {prefix}{key.value or 'an empty key'} is not a configuration key")
        name = f"{prefix}{key.value}"
        if name in found:
            raise ValueError(f"{_at(path, line)}: {name} is given twice, first in line {found[name]}")
        found[name] = line
        if isinstance(value, yaml.MappingNode):
            found |= _lines(path, value, f"{name}.")
    return found


def _at(path: str, line: int | None) -> str:
    return path if line is None else f"{path}, line {line}"
