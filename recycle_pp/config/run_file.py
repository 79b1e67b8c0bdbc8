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
from .setting import Rule, rules, shown
from .settings import FAULTS, Run, Settings

COMMANDS = frozenset({"on_event", "evaluate"})  # keys of run with a command for the shell
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
    try:
        return _read(path, resolve)
    except RecursionError:
        raise ValueError(f"{path} cannot be read: it is nested too deeply, or an alias contains itself") from None


def _read(path: str, resolve: bool) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    node, parsed = _parsed(path)
    lines = _lines(path, node)
    _refuse_dots(path, parsed, lines)
    commands = parsed.get("run")
    if isinstance(commands, dict):
        commands |= {name: with_shell_variables(commands[name]) for name in COMMANDS & commands.keys()}
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


def with_shell_variables(command: Any) -> Any:
    """The command, in which ${NAME}, ${NAME:-text} and the like are left to the shell. Names with a dot, such as
    ${run.dir} and ${oc.env:NAME}, and ${now:...} are interpolations. A value that is not a text is unchanged."""
    if not isinstance(command, str):
        return command
    return re.sub(r"(?<!\\)\$\{(?=[#!]?\w+[^\w.\s\[])(?!now:)", r"\\${", command)


def literal(value: Any) -> Any:
    """The value, in which no text is an interpolation when it is read."""
    if isinstance(value, list):
        return list(map(literal, value))
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def dumped(data: Any, **how: Any) -> str:
    """The data in YAML. Texts that YAML 1.1 or this module would read as other values are in quotes."""
    text: str = yaml.dump(data, Dumper=_Dumper, allow_unicode=True, **how)
    return text


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
        text = dumped([value if value == Run.dir else literal(value)], default_flow_style=True, width=10**6)
        yield f"{indent}{name}: {text.strip()[1:-1]}"


class _Loader(yaml.SafeLoader):
    """Reads plain scalars as in YAML 1.2. PyYAML itself follows YAML 1.1, in which 3e-4 is a string."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)  # type: ignore[no-untyped-call]
        except (ValueError, ArithmeticError):  # !!int "x", a date such as 2026-99-99, or a number with 5,000 digits
            text = node.value if len(node.value) <= 20 else f"{node.value[:17]}..."
            problem = f"{text} is not a valid {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        first: [*resolvers, *_Loader.yaml_implicit_resolvers.get(first, ())]
        for first, resolvers in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }


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


def _refuse_dots(path: str, parsed: Mapping[str, Any], lines: Mapping[str, int]) -> None:
    """Raises ValueError if a setting is not in its group but has a dot in its name, as on the command line."""
    for key, value in parsed.items():
        if "." in key and key in rules(Settings):
            text = f"{shown(value)}"
            for part in reversed(key.split(".")[1:]):
                text = f"{{{part}: {text}}}"
            raise ValueError(f"{_at(path, lines[key])}: in a file, {key} is written {key.partition('.')[0]}: {text}")


def _at(path: str, line: int | None) -> str:
    return path if line is None else f"{path}, line {line}"
