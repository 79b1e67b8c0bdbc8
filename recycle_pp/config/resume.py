"""The settings of a resumed run: those in its folder's config.yaml, except for keys that the command line sets.

    settings, said = take_up(arguments, before)     # before: data of config.yaml; ValueError if a change is not allowed
    said                                            # the changes: ["optimizer.lr 0.001 -> 0.003"]

- The keys in a settings file (`run.yaml`) count as keys of the command line.
- A group on the command line (`optimizer=staggered`) replaces the whole group. `parallel=2x3` sets only the numbers of
  pipelines and stages.
- The number of micro-batches in a step stays the same. If the number of pipelines changes, parallel.microbatches is
  adapted, unless the command line sets it.
- Keys that belong to a single start (`Change.START`), such as run.dir and the faults, are not taken from config.yaml.
  Keys with `Change.NEVER` must not change.
- Keys that config.yaml lacks get their defaults. Keys that no longer exist are reported and ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .checks import check_ranges
from .compose import chosen, compose, keys_of, split_of
from .loading import flat, known, load, nested
from .run_file import read_run_file, split
from .setting import Change, rules
from .settings import Parallel, Settings

_RULES = rules(Settings)
_OF_A_START = frozenset(key for key, rule in _RULES.items() if rule.change is Change.START)


def take_up(arguments: Sequence[str], before: Mapping[str, Any]) -> tuple[Settings, list[str]]:
    """The settings, and a sentence for each key that changes or no longer exists.

    arguments  the command line
    before     the keys of the run's config.yaml

    Raises:
        ValueError: a value of config.yaml has the wrong type or range, or a change is not allowed.
    """
    keys = flat(asdict(Settings()))
    defaults = flat(asdict(compose([])))
    words, path = split(arguments)
    named = keys_of(words)
    # The parallel.microbatches in a settings file belongs to the number of pipelines in this file. It is ignored if the
    # command line changes that number.
    if path is not None and "parallel.pipelines" not in named:
        named |= read_run_file(path).keys()
    old = {key: value for key, value in flat(before).items() if key in keys and key not in _OF_A_START}
    said = [f"{key} is no longer a key and was ignored" for key in flat(before) if key not in keys]
    if old.get("numerics.precision") == "bf16" and "numerics.sums" not in old:
        # The version that wrote this file had no numerics.sums, and its bf16 meant autocast.
        old["numerics.precision"] = "bf16-autocast"
    if "run.validate_samples" not in old:
        # In versions without validate_samples, the default of validate_microbatches was not null.
        old.pop("run.validate_microbatches", None)
    now = flat(asdict(compose(list(arguments))))
    asked = _OF_A_START | chosen(arguments)
    _check_file(before, asked, now["run.dir"])
    values = {key: now[key] if key in asked else old.get(key, defaults[key]) for key in now}
    if "parallel.microbatches" not in named:
        values["parallel.microbatches"] = _share(old, values["parallel.pipelines"], now["run.dir"])
    if now["model.split"] == "auto" and "model.split=auto" not in words:
        values["model.split"] = split_of(old.get("model.split", "auto"), values["parallel.stages"])
    settings: Settings = load(nested(values))
    refuse_changes(old, settings)
    said += [f"{key} {old[key]} -> {values[key]}" for key in values if key in old and values[key] != old[key]]
    return settings, said


def _check_file(before: Mapping[str, Any], asked: Collection[str], folder: str) -> None:
    """Raises ValueError, which names config.yaml, if a value that is taken from it has the wrong type or range.

    before  the data of config.yaml
    asked   keys whose values are not taken from config.yaml
    folder  the run's folder
    """
    kept = {key: value for key, value in flat(before).items() if key not in asked}
    try:
        settings: Settings = load(known(nested(kept)))
        check_ranges(settings)
    except ValueError as error:
        raise ValueError(f"{folder}/config.yaml cannot be read: {error}") from None


def _share(old: Mapping[str, Any], pipelines: int, folder: str) -> int:
    """The number of micro-batches per pipeline that keeps the number of micro-batches in a step unchanged.

    old        the flat settings of config.yaml
    pipelines  the new number of pipelines

    Raises ValueError if `pipelines` does not divide the number of micro-batches in a step."""
    before, each = (old.get(f"parallel.{key}", getattr(Parallel(), key)) for key in ("pipelines", "microbatches"))
    if not all(isinstance(number, int) for number in (before, each, pipelines)) or pipelines < 1:
        return each  # a later check rejects the wrong type or range
    total = before * each
    if total % pipelines:
        allowed = ", ".join(str(number) for number in range(1, total + 1) if total % number == 0)
        raise ValueError(
            f"parallel.pipelines must divide the {total} micro-batches of a step ({before} pipelines x {each}) when "
            f"run.dir={folder} is resumed, but {pipelines} does not; allowed: {allowed}"
        )
    return total // pipelines


def refuse_changes(old: Mapping[str, Any], settings: Settings) -> None:
    """Raises ValueError if a setting has changed that must stay the same during a run.

    old: key -> value in the run's config.yaml
    """
    default = flat(asdict(Settings()))
    where = f"when run.dir={settings.run.dir} is resumed"
    for key, value in flat(asdict(settings)).items():
        stays = _RULES[key].change is Change.NEVER
        was = old.get(key, default[key])  # the config.yaml of an earlier version may lack the key
        if stays and was != value:
            raise ValueError(f"{key} must stay {was} {where}, not {value}".replace("None", "null"))
    pipelines, microbatches = old.get("parallel.pipelines"), old.get("parallel.microbatches")
    if not isinstance(pipelines, int) or not isinstance(microbatches, int):
        return  # an earlier version, with other names for these keys, wrote the file
    if pipelines * microbatches != settings.parallel.pipelines * settings.parallel.microbatches:
        raise ValueError(
            f"parallel.pipelines * parallel.microbatches must stay {pipelines * microbatches} {where}, "
            f"not {settings.parallel.pipelines} * {settings.parallel.microbatches}"
        )
