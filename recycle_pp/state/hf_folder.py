"""Exports a checkpoint as a folder for Hugging Face's `from_pretrained`: safetensors, config.json, the tokenizer.

    model, path = of_run("runs/mine", step=None, dtype=torch.float32)    # the newest undamaged checkpoint
    write(model, Path("out"))                                # blocks until the folder is on disk
    model.config; model.load(["lm_head.weight"])             # config.json and single tensors

The project's own Transformer is exported as a Llama. A model loaded from a folder (`model.path`) keeps its names,
config.json and tokenizer. A user's own model is exported without config.json. Only the weights are read, one output
file at a time.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recycle_pp.config.settings import Model
from recycle_pp.data import tokenizer
from recycle_pp.data.sources import is_text, paths
from recycle_pp.model.llama_names import llama_config, to_llama
from recycle_pp.telemetry.checkpoint_folders import finished
from recycle_pp.telemetry.run_folder import RunFolder

from . import checkpoint
from .checksum import damage

TRIES = 3  # attempts, because a running job may delete the checkpoint that is being read
SHARD = 4 << 30  # maximum bytes per file; a larger tensor gets its own file
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One exported tensor, which consists of rows of a tensor in the checkpoint."""

    source: str
    rows: slice
    shape: tuple[int, ...]


class Exported:
    """A checkpoint's model with Hugging Face's names.

    config  content of config.json; None for a user's own model
    parts   name -> Part, in the model's order

    Raises ValueError if the checkpoint does not match the run's configuration.
    """

    def __init__(self, run: Mapping[str, Any], path: Path, dtype: torch.dtype):
        self._path, self.dtype = path, dtype
        self._run, self._folder = run, run["model"].get("path")
        held = {
            name[len("model.") :]: shape for name, shape in checkpoint.shapes(path).items() if name.startswith("model.")
        }
        self.own = "layers.0.attention.wqkv.weight" in held
        if self.own:
            known = {field.name for field in fields(Model)}
            model = Model(**{key: value for key, value in run["model"].items() if key in known})
            names = to_llama(model)
            if names.keys() != held.keys():
                other = sorted(names.keys() ^ held.keys())[0]
                raise ValueError(f"{path} does not hold the model of its run's config.yaml: they differ in {other}")
            self.parts = {
                name: Part(own, rows, _rows(held[own], rows)) for own, parts in names.items() for name, rows in parts
            }
            self.config: dict[str, Any] | None = llama_config(model)
        else:
            self.parts = {name: Part(name, slice(None), shape) for name, shape in held.items()}
            self.config = None
        if self._folder is not None and (found := Path(self._folder) / "config.json").is_file():
            self.config = json.loads(found.read_text())
        if self.config is not None:
            self.config.pop("torch_dtype", None)
            self.config["dtype"] = str(dtype).removeprefix("torch.")

    def size(self, name: str) -> int:
        return prod(self.parts[name].shape) * self.dtype.itemsize

    def load(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The named tensors, contiguous and in `dtype`. Each one has its own memory."""
        sources = dict.fromkeys(self.parts[name].source for name in names)
        whole = checkpoint.load(self._path, [f"model.{source}" for source in sources])
        out = {}
        for name in names:
            part = self.parts[name]
            out[name] = whole[f"model.{part.source}"][part.rows].to(self.dtype, copy=True).contiguous()
        return out

    def write_config(self, folder: Path) -> bool:
        """Writes config.json and the tokenizer. Returns False if the tokenizer is unknown."""
        if self._folder is not None:
            _copy(Path(self._folder), ("generation_config.json",), folder)
        if self.config is not None:
            _write_json(folder / "config.json", self.config)
        data = self._run["data"]
        place = data.get("tokenizer")
        if place is None and self._folder is not None:
            return _copy(Path(self._folder), TOKENIZER, folder)
        if place == tokenizer.BYTES or (place is None and all(map(is_text, paths(data.get("path"))))):
            _write_bytes_tokenizer(folder)
            return True
        if place is None:  # trained on token files
            return False
        _copy_tokenizer(tokenizer.definition(place), data.get("separator"), folder)
        return True


def of_run(run_dir: str | Path, step: int | None, dtype: torch.dtype) -> tuple[Exported, Path]:
    """The model of a run's checkpoint, and the checkpoint's path. step=None selects the newest undamaged checkpoint.

    Raises ValueError if the run or the checkpoint does not exist, or if the checkpoint is damaged.
    """
    run = RunFolder(run_dir)
    run.require()
    settings = asdict(run.read_settings())
    for last in (False,) * (TRIES - 1) + (True,):
        before = finished(run.checkpoints)
        try:
            path = _checkpoint(run, step)
            return Exported(settings, path, dtype), path
        except (ValueError, OSError):
            if last or finished(run.checkpoints) == before:  # the job has not deleted a checkpoint meanwhile
                raise
    raise AssertionError("the last try returns or raises")


def _checkpoint(run: RunFolder, step: int | None) -> Path:
    """The checkpoint after `step` steps. If `step` is None, the newest undamaged one. Reads the whole checkpoint."""
    found = finished(run.checkpoints)
    if not found:
        raise ValueError(f"{run.path} has no complete checkpoint yet; checkpoint.every sets how often one is saved")
    if step is not None and step not in found:
        raise ValueError(
            f"--step must be one of {', '.join(map(str, found))}, the checkpoints in {run.path}, not {step}"
        )
    damages = []
    for number in [step] if step is not None else reversed(found):
        if (wrong := damage(found[number], number)) is None:
            return found[number]
        damages.append(f"the checkpoint {found[number]} is damaged: {wrong}")
        if step is None and number != min(found):
            print(f"{damages[-1]}; trying the previous one", file=sys.stderr, flush=True)
    raise ValueError(damages[0])


def write(model: Exported, out: Path, shard: int = SHARD, report: Callable[[int, int], None] | None = None) -> bool:
    """Writes the folder `out` completely or not at all. Returns False if it has no tokenizer, because that is unknown.

    shard   maximum bytes per file of weights
    report  called after each file with (done, total) in bytes

    Raises ValueError if `out` exists, OSError if it cannot be written.
    """
    refuse_existing(out)
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process
    temporary.mkdir(parents=True)
    try:
        has_tokenizer = model.write_config(temporary)
        _write_weights(model, temporary, shard, report or (lambda done, total: None))
        for file in temporary.iterdir():
            _sync(file)
        _sync(temporary)
        temporary.rename(out)
        _sync(out.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return has_tokenizer


def refuse_existing(out: Path) -> None:
    if out.exists():
        raise ValueError(f"{out} already exists; choose another folder")


def _write_weights(model: Exported, folder: Path, shard: int, report: Callable[[int, int], None]) -> None:
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise ValueError(
            "the export needs the package safetensors; pip install -e '.[hf]' in the clone of recycle_pp"
        ) from None
    shards: list[list[str]] = [[]]
    for name in model.parts:
        if shards[-1] and sum(map(model.size, shards[-1])) + model.size(name) > shard:
            shards.append([])
        shards[-1].append(name)
    total, done = sum(map(model.size, model.parts)), 0
    index: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(model.load(names), folder / file, metadata={"format": "pt"})
        (folder / file).chmod(folder.stat().st_mode & 0o666)  # safetensors writes files that only this user can read
        index |= dict.fromkeys(names, file)
        done += sum(map(model.size, names))
        report(done, total)
    if len(shards) > 1:
        _write_json(
            folder / "model.safetensors.index.json",
            {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))},
        )


def _rows(shape: tuple[int, ...], rows: slice) -> tuple[int, ...]:
    return (len(range(shape[0])[rows]), *shape[1:])


def _copy(source: Path, names: Sequence[str], folder: Path) -> bool:
    """Copies the named files that exist in `source`. Returns whether any exists."""
    there = [name for name in names if (source / name).is_file()]
    for name in there:
        shutil.copyfile(source / name, folder / name)
    return bool(there)


def _copy_tokenizer(definition: Path, separator: str | None, folder: Path) -> None:
    """Copies a tokenizer.json and the files next to it. If there is no tokenizer_config.json, writes the minimum that
    `from_pretrained` needs."""
    if definition.name == "tokenizer.json":
        _copy(definition.parent, TOKENIZER, folder)
    shutil.copyfile(definition, folder / "tokenizer.json")
    if not (folder / "tokenizer_config.json").exists():
        end = tokenizer.end_of_text(definition, separator)
        _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end})


def _write_bytes_tokenizer(folder: Path) -> None:
    """Writes a byte-level BPE without merges. The id of a byte is its value; byte 0 ends a text."""
    symbols = _byte_symbols()
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": {symbol: byte for byte, symbol in enumerate(symbols)}, "merges": []}
    _write_json(
        folder / "tokenizer.json",
        {"version": "1.0", "added_tokens": [], "pre_tokenizer": level, "decoder": level, "model": model},
    )
    _write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False},
    )


def _byte_symbols() -> list[str]:
    """GPT-2's printable character for each byte. This is the character with the byte's code if that is printable, else
    one from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _sync(path: Path) -> None:
    """Flushes a file or the entries of a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
