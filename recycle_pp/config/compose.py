"""Builds Settings from a command line, a settings file and the files under `configs/`, with Hydra.

    settings = compose(["model=tiny", "run.steps=100", "+fail_at=20:1.2"])   # raises ValueError with one sentence
    settings = compose(["run.yaml", "run.steps=100"])                        # the command line overrides the file

`group=name` selects a file of a group. `group.key=value` sets one key. `--config-dir DIR` adds a folder with more
files. `parallel=DxP` sets the numbers of pipelines and stages and needs no file. Unknown keys are rejected, even if
Hydra's `+` or `++` precedes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from recycle_pp.storage.local_copy import copy_apart, is_stored

from .llama import llama_sizes
from .loading import flat, load, nested
from .run_file import COMMANDS, literal, read_run_file, split, with_shell_variables
from .settings import FAULTS, Model, Settings

_PLAIN = (  # keys whose values may hold any character
    *("data.path", "data.validation_path", "data.tokenizer", "model.path"),
    *("run.dir", "run.on_event", "run.evaluate"),
)
_MORE_GROUPS = ("coordinator", "experiment")  # folders of configs/ whose files set keys in several groups


def compose(arguments: Sequence[str]) -> Settings:
    """The settings of a command line. Raises ValueError with one sentence for the user.

    arguments: the command line without the program's name
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    words, path = split(arguments)
    config = _composed(words)
    if path is not None:
        file = {key: literal(value) for key, value in read_run_file(path).items()}  # it has no interpolations any more
        config = _over(file, config, words)
    try:
        data = OmegaConf.to_container(OmegaConf.create(config), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ValueError(_sentence(error, words)) from error
    return _with_sizes(_with_paths(load(data)))  # type: ignore[arg-type]


def chosen(arguments: Sequence[str]) -> set[str]:
    """The keys that the command line sets: directly, through a group, or by its settings file."""
    words, path = split(arguments)
    return _chosen(words, flat(_composed(words))) | (set() if path is None else read_run_file(path).keys())


def keys_of(words: Sequence[str]) -> set[str]:
    """The keys and groups that these settings name. `parallel=DxP` names the two keys that it sets.

    words: settings like "run.steps=100" or "model=tiny"
    """
    found: set[str] = set()
    for text in words:
        if shape(text):
            found |= {"parallel.pipelines", "parallel.stages"}
        elif not text.startswith("-"):
            found.add(text.lstrip("+").partition("=")[0])
    return found


def split_of(counts: Any, stages: Any) -> Any:
    """The model.split to use with this number of stages: "auto" if `counts` is a list of another length, else `counts`.

    counts: model.split as read from a file
    """
    return "auto" if isinstance(counts, list) and len(counts) != stages else counts


def _over(file: Mapping[str, Any], config: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """`config`, with the values of `file` for all keys that `words` do not set.

    config  the configuration composed from `words`
    file    key -> value
    """
    values = flat(config)
    mine = _chosen(words, values)
    values |= {key: value for key, value in file.items() if key not in mine}
    if "parallel.stages" in mine and "model.split" not in mine:
        values["model.split"] = split_of(values["model.split"], values["parallel.stages"])
    values["model.auto_split"] = None  # not taken from `file`, because the file may be from a run of a different shape
    return nested(values)


def _chosen(words: Sequence[str], composed: Mapping[str, Any]) -> set[str]:
    """The keys that `words` set directly or through a group.

    composed: key -> value, in the configuration composed from `words`
    """
    found: set[str] = set()
    rest, folders = _config_dirs(words)
    for text in rest:
        for name in keys_of([text]):
            if "." in name or name in FAULTS:
                found.add(name)
            else:
                found |= {key for key in composed if key.startswith(f"{name}.")}
                found |= _set_by(name, text.partition("=")[2], [*folders, config_dir()])
    return found


def _set_by(group: str, option: str, folders: Sequence[Path]) -> set[str]:
    """The keys in a file of a group, which may belong to other groups (`# @package`)."""
    from omegaconf import OmegaConf

    files = [folder / group / f"{option}.yaml" for folder in folders]
    file = next((file for file in files if file.exists()), None)
    if file is None:  # experiment=null
        return set()
    package = re.match(r"# @package (\S+)", file.read_text())
    inside = group if package is None else package[1]
    keys = flat(OmegaConf.to_container(OmegaConf.load(file)))  # type: ignore[arg-type]
    return {key if inside == "_global_" else f"{inside}.{key}" for key in keys if not key.startswith("defaults")}


def _composed(words: Sequence[str]) -> dict[str, Any]:
    """The configuration that Hydra composes from a command line without a file. Keeps interpolations, ${...}."""
    rest, folders = _config_dirs(words)
    overrides = [override for text in _layout_first(rest) for override in _overrides(text, folders)]
    if folders:
        overrides.append(f"hydra.searchpath=[{','.join(folder.as_uri() for folder in folders)}]")
    _refuse_repeated_faults(overrides)
    return _by_hydra(tuple(overrides))


@cache  # Hydra takes 0.2 s, and a start needs the same configuration several times
def _by_hydra(overrides: tuple[str, ...]) -> dict[str, Any]:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with initialize_config_dir(str(config_dir()), version_base="1.3", job_name="recycle_pp"):
            config = OmegaConf.to_container(hydra_compose("config", list(overrides)))
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_sentence(error, list(overrides))) from error
    assert isinstance(config, dict)
    config.pop("experiment", None)
    return config  # type: ignore[return-value]


def _with_paths(settings: Settings) -> Settings:
    """The settings with ~ expanded in all paths, because the shell does not expand ~ after =.

    Raises ValueError if run.dir is a URL, or if the user after a ~ does not exist.
    """
    data, model = settings.data, settings.model
    if "://" in settings.run.dir:
        raise ValueError(
            f"run.dir must be the path of a folder, not the URL {settings.run.dir}; checkpoint.store names a store"
        )
    values: dict[str, Any] = {
        "run.dir": _expanded(settings.run.dir),
        "data.path": _expanded(data.path),
        "data.validation_path": _expanded(data.validation_path),
    }
    if data.tokenizer and data.tokenizer != "bytes" and "://" not in data.tokenizer:
        # The path must be absolute, because an export uses it from another folder.
        values["data.tokenizer"] = str(_at_home(data.tokenizer).absolute())
    if model.path and "://" not in model.path:
        values["model.path"] = str(_at_home(model.path).absolute())
    return settings.with_values(values)


def _with_sizes(settings: Settings) -> Settings:
    """The settings, with the sizes from config.json if model.path names a Hugging Face folder."""
    model = settings.model
    if model.kind in ("llama", "hf") and is_stored(model.path or ""):
        _copy_config(str(model.path))
    if model.kind == "llama":
        if model.folder is None:
            raise ValueError("model.path must name a folder with a config.json (model=llama), not null")
        return replace(settings, model=replace(model, **llama_sizes(model.folder, model.sequence)))
    if model.kind == "hf" and model.vocabulary == 0:
        return settings.with_values({"model.vocabulary": _vocabulary(model.folder)})
    return settings


@cache
def _copy_config(url: str) -> None:
    """Copies the small files of a model to this machine, once in a process."""
    copy_apart({url: True})


def _vocabulary(folder: Path | None) -> int:
    """The vocabulary size in the folder's config.json. 0 if it cannot be read; `checks` then reports the error."""
    return _number(folder, "vocab_size")


def beyond_positions(model: Model) -> str | None:
    """A sentence for the user if samples are longer than the positions for which the folder's model was made."""
    known = _number(model.folder, "max_position_embeddings") if model.kind in ("llama", "hf") else 0
    if not 0 < known < model.sequence:
        return None
    return (
        f"model.sequence={model.sequence} is longer than the {known} positions (max_position_embeddings) of "
        f"{model.path}; the model may have to learn the positions after these, and an export keeps this number"
    )


def _number(folder: Path | None, key: str) -> int:
    """A number in the folder's config.json, or 0."""
    try:
        config = json.loads(((folder or Path()) / "config.json").read_text())
        return int(config.get(key) or config.get("text_config", {}).get(key) or 0)
    except (OSError, ValueError, AttributeError, TypeError):
        return 0


def shape(text: str) -> tuple[int, int] | None:
    """(pipelines, stages) of a setting like "parallel=5x3"; None for other settings."""
    match = re.fullmatch(r"\+*parallel=([1-9]\d*)x([1-9]\d*)", text)
    return (int(match[1]), int(match[2])) if match else None


def _expanded(path: str | list[str] | None) -> str | list[str] | None:
    if isinstance(path, list):
        return [one if "://" in one else str(_at_home(one)) for one in path]
    return str(_at_home(path)) if path and "://" not in path else path


def _at_home(path: str) -> Path:
    """The path, with ~ expanded. Raises ValueError if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(f"{path}: there is no user {path.partition('/')[0].removeprefix('~')}") from None


def config_dir() -> Path:
    """`configs/` of the checkout, or its copy in the installed package."""
    package = Path(__file__).resolve().parents[1]
    return package / "configs" if (package / "configs").is_dir() else package.parent / "configs"


# ------------------------------------------------------------------------------------------------------ overrides


def _config_dirs(arguments: Sequence[str]) -> tuple[list[str], list[Path]]:
    """Splits a command line into (the settings, the folders of `--config-dir DIR`).

    Raises ValueError for any other option.
    """
    rest, folders, queue = [], [], list(arguments)
    while queue:
        text = queue.pop(0)
        if text == "--config-dir" or text.startswith("--config-dir="):
            folder = text.partition("=")[2] or (queue.pop(0) if queue else "")
            if not Path(folder).is_dir() or not folder:
                raise ValueError(f"--config-dir must name a folder, not {folder!r}")
            folders.append(Path(folder).resolve())
        elif text.startswith("-"):
            raise ValueError(f"{text} is not an option; allowed: --help, --config-dir DIR, and settings KEY=VALUE")
        else:
            rest.append(text)
    return rest, folders


def _layout_first(texts: list[str]) -> list[str]:
    """Moves the last `parallel=NAME` before all other settings, because Hydra applies files before keys. Drops any
    earlier `parallel=NAME`."""
    layouts = [text for text in texts if text.lstrip("+").startswith("parallel=")]
    return [*layouts[-1:], *(text for text in texts if text not in layouts)]


def _overrides(text: str, folders: list[Path]) -> list[str]:
    """One setting as overrides for Hydra. `parallel=DxP` becomes two overrides, unless parallel/DxP.yaml exists."""
    numbers = shape(text)
    name = text.partition("=")[2]
    if numbers and not any((folder / "parallel" / f"{name}.yaml").is_file() for folder in (config_dir(), *folders)):
        return [f"++parallel.pipelines={numbers[0]}", f"++parallel.stages={numbers[1]}"]
    return [_override(text)]


def _override(text: str) -> str:
    """A setting as an override for Hydra.

    The override of a key begins with `++`, so that Hydra accepts any key: `load` later reports unknown keys better than
    Hydra, and `fail_at=` works like `+fail_at=`.
    """
    key, equals, value = text.partition("=")
    bare = key.lstrip("+")
    if key.startswith("~"):
        raise ValueError(f"{text}: a setting cannot be deleted; give it a value, {key[1:] or 'KEY'}=VALUE")
    if not equals or not bare:
        raise ValueError(
            f"{text!r} is not a setting; allowed: KEY=VALUE, for instance run.steps=100, or a file such as run.yaml"
        )
    if bare.startswith("hydra."):
        return text
    if re.split("[.@]", bare)[0] == bare and bare not in FAULTS and bare in (*_groups(), *_MORE_GROUPS):
        if not re.fullmatch(r"(?!null$|\d+$)[\w/.-]+", value):
            raise ValueError(
                f"{bare} takes the name of a file in configs/{bare}/: {', '.join(options(bare))}; not {value!r}"
            )
        return f"{bare}={value}"
    if bare in [f"run.{name}" for name in COMMANDS]:
        value = with_shell_variables(value)
    if bare in _PLAIN and value != "null" and value[:1] not in ("'", '"') and not re.fullmatch(r"\[.*\]", value):
        value = "'" + value.replace("'", "\\'") + "'"  # Hydra's grammar reserves ~ = ( [ {
    return f"++{bare}={value}"


def _groups() -> list[str]:
    return [group.name for group in fields(Settings) if group.name not in FAULTS]


def options(group: str) -> list[str]:
    """The names of the files in `configs/` for this group."""
    return sorted(path.stem for path in (config_dir() / group).glob("*.yaml"))


def _refuse_repeated_faults(overrides: list[str]) -> None:
    keys = [text.lstrip("+").partition("=")[0] for text in overrides]
    for key in FAULTS:
        if keys.count(key) > 1:
            raise ValueError(f"{key} is given twice; several faults go in one list, '+{key}=[20:1.2,31:0.1]'")


def _sentence(error: Exception, overrides: list[str]) -> str:
    """One sentence for an error of Hydra, whose own messages have several lines and mention Hydra's options."""
    text = str(error)
    if match := re.search(r"Could not find '([^/']+)/([^']*)'", text):
        names = re.findall(r"^\t(\S+)$", text.partition("Config search path")[0], re.MULTILINE)
        more = ", or DxP for D pipelines of P stages" if match[1] == "parallel" else ""
        return f"{match[1]}={match[2]}: there is no such file in configs/{match[1]}/; allowed: {', '.join(names)}{more}"
    if match := re.search(r"Ambiguous value for argument '\+*(([^=']+)=([^']*))'", text):
        return f"{match[1]} has several values; a list goes in brackets, '{match[2]}=[{match[3]}]'"
    if "override_grammar" in text or "config group" in text.lower():
        return f"{_unreadable(overrides)}: no such value; special characters go in quotes, KEY='\"a=b\"'"
    if match := re.search(r"full_key: (\S+)", text):
        return f"{match[1]}: {text.splitlines()[0]}"
    return " ".join(line.strip() for line in text.splitlines() if line.strip())


def _unreadable(overrides: list[str]) -> str:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    for text in overrides:
        try:
            OverridesParser.create().parse_override(text)
        except HydraException:
            return text.lstrip("+")
    return " ".join(overrides)
