"""Exports a checkpoint as a folder for Hugging Face's `from_pretrained`: safetensors, config.json, the tokenizer.

    model, path = of_run("runs/mine", step=None, dtype=torch.float32)    # the newest undamaged checkpoint
    model, path = of_run("runs/lora", None, torch.float32, merge=True)   # merge=False: only the adapters
    model, path = of_run("runs/oregon", None, torch.float32, vector="theta")     # the common weights of all islands
    write(model, Path("out"))                                # blocks until the folder is on disk
    model.config; model.load(["lm_head.weight"])             # config.json and single tensors

The project's own Transformer is exported as a Llama. A model loaded from a folder (`model.path`) keeps its names,
config.json and tokenizer. A user's own model is exported without config.json. A run with adapters is exported for
peft, or merged. Frozen parameters and persistent buffers come from the run's initial values. Only the weights of a
checkpoint are read, one output file at a time.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recycle_pp.config.loading import load
from recycle_pp.config.settings import Model, Settings
from recycle_pp.model.general.lora import peft_config
from recycle_pp.model.general.untrained import Untrained, has_all
from recycle_pp.model.llama_names import llama_config, to_llama
from recycle_pp.storage.local_copy import copy, is_stored, place
from recycle_pp.storage.store import Store
from recycle_pp.telemetry.best_checkpoint import best
from recycle_pp.telemetry.checkpoint_folders import finished
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.telemetry.stored_run import is_url, local

from . import checkpoint
from .checksum import damage
from .hf_tokenizer import answer_end, copy_files, end_ids, separator, write_json, write_tokenizer
from .replacing import sync
from .stored import StoredCheckpoints, steps_in

A, B = ".lora_A.default.weight", ".lora_B.default.weight"  # suffixes of the names of an adapter's matrices
TRIES = 3  # attempts, because a running job may delete the checkpoint that is being read
INDEX = "model.safetensors.index.json"
SHARD = 4 << 30  # maximum bytes per file; a larger tensor gets its own file


@dataclass(frozen=True)
class Part:
    """One exported tensor, which consists of rows of a tensor in the checkpoint.

    source: None for a tensor that the checkpoint does not contain
    dtype: None for the dtype of the export
    """

    source: str | None
    rows: slice
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


class Exported:
    """A checkpoint's model with Hugging Face's names.

    config  content of config.json; None for a user's own model
    parts   name -> Part, in the model's order
    stem    name of a weights file, without its number and suffix

    vector: "model", the weights; "theta": the common weights of all islands after the latest round

    Raises ValueError if the checkpoint does not match the run's configuration, or has no such vector.
    """

    stem = "model"
    whole = True  # whether to export frozen parameters and buffers too

    def __init__(self, run: Mapping[str, Any], path: Path, dtype: torch.dtype, vector: str = "model"):
        self._path, self.dtype, self._vector = path, dtype, vector
        self._run, self._folder = run, _copied(run["model"].get("path"))
        named = [(name.partition("."), shape) for name, shape in checkpoint.shapes(path).items()]
        held = {name: shape for (of, _, name), shape in named if of == vector}
        if not held:
            raise ValueError(f"{path} has no common weights of islands, because its run had no islands.store")
        self._described = False  # whether config.json is written here, not copied
        self.own = "layers.0.attention.wqkv.weight" in held
        if self.own:
            known = {field.name for field in fields(Model)}
            model = Model(**{key: value for key, value in run["model"].items() if key in known})
            names = to_llama(model)
            if names.keys() != held.keys():
                other = sorted(names.keys() ^ held.keys())[0]
                raise ValueError(f"{path} does not match the model in its run's config.yaml: they differ in {other}")
            self.parts = {
                name: Part(own, rows, _rows(held[own], rows)) for own, parts in names.items() for name, rows in parts
            }
            self.config: dict[str, Any] | None = llama_config(model)
            self._described = True
        else:
            self.parts = {name: Part(name, slice(None), shape) for name, shape in held.items()}
            self.config = None
            if self.whole and run["model"]["kind"] in ("hf", "custom") and not has_all(held, path.parent.parent):
                self._add(Untrained(_without_adapters(run), held, path.parent.parent))
        if self._folder is not None and (found := self._folder / "config.json").is_file():
            self.config, self._described = json.loads(found.read_text()), False
        if self.config is not None:
            self.config.pop("torch_dtype", None)
            self.config["dtype"] = str(dtype).removeprefix("torch.")

    @property
    def entries(self) -> tuple[str, ...]:
        """File names. A folder can be loaded if it contains one of these files."""
        return ("config.json",) if self.config is not None else ("model.safetensors", INDEX)

    def size(self, name: str) -> int:
        return prod(self.parts[name].shape) * (self.parts[name].dtype or self.dtype).itemsize

    def load(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The named tensors, contiguous and in `dtype`. Each one has its own memory. Buffers keep their dtype."""
        sources = dict.fromkeys(part.source for name in names if (part := self.parts[name]).source is not None)
        whole = checkpoint.load(self._path, [f"{self._vector}.{source}" for source in sources]) if sources else {}
        out = {}
        for name in names:
            part = self.parts[name]
            value = self._untrained(name) if part.source is None else whole[f"{self._vector}.{part.source}"][part.rows]
            out[name] = value.to(part.dtype or self.dtype, copy=True).contiguous()
        return out

    def _add(self, rest: Untrained) -> None:
        """Adds the tensors that the checkpoint does not contain."""
        self._rest = rest
        self.parts |= {name: Part(None, slice(None), shape) for name, shape in rest.frozen.items()}
        self.parts |= {name: Part(None, slice(None), tuple(b.shape), b.dtype) for name, b in rest.buffers.items()}

    def _untrained(self, name: str) -> Tensor:
        return self._rest.buffers[name] if name in self._rest.buffers else self._rest.read(name)

    def write_config(self, folder: Path) -> bool:
        """Writes config.json and the tokenizer. Returns False if the tokenizer is unknown."""
        if self._folder is not None:
            copy_files(self._folder, ("generation_config.json",), folder)
        has_tokenizer = write_tokenizer(self._run, self._folder, folder)
        if self.config is not None:
            # without these entries transformers would assume that the tokens 1 and 2 begin and end a text
            ends = {"eos_token_id": self.separator, "bos_token_id": None, "pad_token_id": None}
            config = self.config | (ends if self._described else {})
            write_json(folder / "config.json", config)
            self._end_answers(folder / "generation_config.json", config.get("eos_token_id"))
        return has_tokenizer

    def _end_answers(self, file: Path, of_config: int | list[int] | None) -> None:
        """Adds the token that ends an answer to those in generation_config.json at which `generate` stops."""
        end, found = answer_end(self._run), json.loads(file.read_text()) if file.is_file() else {}
        ends = end_ids(found.get("eos_token_id", of_config))
        if end is not None and end not in ends:
            write_json(file, found | {"eos_token_id": [*ends, end]})

    @property
    def separator(self) -> int | None:
        """The id of the token after every document of the training data; None if it is unknown."""
        return separator(self._run, self._folder)


class Adapter(Exported):
    """The adapters of a run with model.lora, for peft's `from_pretrained`."""

    stem = "adapter_model"
    whole = False
    entries = ("adapter_config.json",)  # type: ignore[assignment]

    def __init__(self, run: Mapping[str, Any], path: Path, dtype: torch.dtype, vector: str = "model"):
        super().__init__(run, path, dtype, vector)
        self.parts = {f"base_model.model.{name.replace('.default.', '.')}": of for name, of in self.parts.items()}

    def write_config(self, folder: Path) -> bool:
        peft_config(load(self._run["model"], Model)).save_pretrained(folder)
        return write_tokenizer(self._run, self._folder, folder)


class Merged(Exported):
    """The whole model of a run with model.lora: the weights in model.path, with the products of the adapters added."""

    whole = False

    def __init__(self, run: Mapping[str, Any], path: Path, dtype: torch.dtype, vector: str = "model"):
        super().__init__(run, path, dtype, vector)
        lora, rest = load(run["model"], Model).lora, Untrained(_without_adapters(run), (), path.parent.parent)
        self._scale = lora.alpha / lora.rank
        # adapted module -> whether its weight has the shape (inputs, outputs), not (outputs, inputs)
        adapted = [name.removesuffix(A) for name in self.parts if name.endswith(A)]
        self._adapted = {name: type(rest.model.get_submodule(name)).__name__ == "Conv1D" for name in adapted}
        self.parts = {}
        self._add(rest)

    def _untrained(self, name: str) -> Tensor:
        value, (module, _, kind) = super()._untrained(name), name.rpartition(".")
        if module not in self._adapted or kind != "weight":
            return value
        a, b = checkpoint.load(self._path, [f"{self._vector}.{module}{end}" for end in (A, B)]).values()
        return value.float() + ((b @ a).T if self._adapted[module] else b @ a) * self._scale


def of_run(
    run_dir: str | Path, step: int | None, dtype: torch.dtype, merge: bool = False, vector: str = "model"
) -> tuple[Exported, Path]:
    """The model of a run's checkpoint, and the checkpoint's path. step=None selects the newest undamaged checkpoint.

    run_dir: the run folder, or the URL of its store. A checkpoint that is only in the store is downloaded
    merge: whether to export the whole model of a run with model.lora instead of only the adapters
    vector: see `Exported`

    Raises ValueError if the run or the checkpoint does not exist, or if the checkpoint is damaged.
    """
    run = RunFolder(local(str(run_dir)))
    run.require()
    settings = asdict(run.read_settings())
    url, present = str(run_dir) if is_url(str(run_dir)) else settings["checkpoint"]["store"], finished(run.checkpoints)
    if url is not None and not (present if step is None else step in present):
        _download(url, step, run.checkpoints)
    kind = Exported if not settings["model"]["lora"]["rank"] else Merged if merge else Adapter
    for last in (False,) * (TRIES - 1) + (True,):
        before = finished(run.checkpoints)
        try:
            path = _checkpoint(run, step)
            return kind(settings, path, dtype, vector), path
        except (ValueError, OSError):
            if last or finished(run.checkpoints) == before:  # no checkpoint was deleted meanwhile, so the error is real
                raise
    raise AssertionError("the last try returns or raises")


def best_step(run_dir: str) -> int:
    """Number of steps of the checkpoint with the lowest validation loss. Raises ValueError if none was validated.

    run_dir: the run folder, or the URL of its store; with a URL, only the checkpoints in the store are considered
    """
    run = RunFolder(local(run_dir))
    store = run.read_settings().checkpoint.store
    step = best(
        run.metrics, StoredCheckpoints(Store(run_dir)).steps() if is_url(run_dir) else steps_in(run.checkpoints, store)
    )
    if step is None:
        raise ValueError(f"{run_dir} has no checkpoint with a validation loss (run.validate_every, checkpoint.every)")
    return step


def _download(url: str, step: int | None, folder: Path) -> None:
    """Downloads the checkpoint of `step` steps into `folder`; None: the newest complete one. Does nothing if the store
    has no such checkpoint, or only an incomplete one."""
    stored = StoredCheckpoints(Store(url))
    wanted = (number for number in reversed(stored.steps()) if step in (None, number) and not stored.damage(number))
    if (number := next(wanted, None)) is not None:
        folder.mkdir(parents=True, exist_ok=True)
        stored.fetch(number, folder)


def _checkpoint(run: RunFolder, step: int | None) -> Path:
    """The folder of the checkpoint of `step` steps; None: the newest undamaged one. Reads the whole checkpoint.

    Raises ValueError if there is no such checkpoint, or if it is damaged."""
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
    """Writes the folder `out` completely or not at all. Returns False if the tokenizer is unknown and thus missing.

    shard   maximum bytes per weights file
    report  called after each file with (done, total) in bytes

    Raises ValueError if `out` exists, OSError if it cannot be written.
    """
    refuse_existing(out)
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process
    temporary.mkdir(parents=True)
    try:
        has_tokenizer = model.write_config(temporary)
        for _ in write_weights(model, temporary, shard, report or (lambda done, total: None)):
            pass
        for file in temporary.iterdir():
            sync(file)
        sync(temporary)
        temporary.rename(out)
        sync(out.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return has_tokenizer


def refuse_existing(out: Path) -> None:
    if out.exists():
        raise ValueError(f"{out} already exists; choose another folder")


def write_weights(model: Exported, folder: Path, shard: int, report: Callable[[int, int], None]) -> Iterator[Path]:
    """Writes the weights files and, if there are several, their index. Yields the path of each written file."""
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise ValueError(
            "the export needs the package safetensors; pip install -e '.[hf]' in the clone of recycle_pp"
        ) from None
    shards: list[list[str]] = [[]]
    for name in model.parts:
        if shards[-1] and model.stem == "model" and sum(map(model.size, shards[-1])) + model.size(name) > shard:
            shards.append([])
        shards[-1].append(name)
    total, done = sum(map(model.size, model.parts)), 0
    index: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"{model.stem}{f'-{number:05}-of-{len(shards):05}' * (len(shards) > 1)}.safetensors"
        save_file(model.load(names), folder / file, metadata={"format": "pt"})
        (folder / file).chmod(folder.stat().st_mode & 0o666)  # safetensors writes files that only this user can read
        index |= dict.fromkeys(names, file)
        done += sum(map(model.size, names))
        yield folder / file
        report(done, total)
    if len(shards) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))})
        yield folder / INDEX


def _copied(folder: str | None) -> Path | None:
    """The local folder for model.path. If that is a URL, copies its small files."""
    if folder is None:
        return None
    return copy(folder, small=True) if is_stored(folder) else place(folder)


def _without_adapters(run: Mapping[str, Any]) -> Settings:
    settings: Settings = load(run)
    return settings.with_values({"model.lora.rank": 0})


def _rows(shape: tuple[int, ...], rows: slice) -> tuple[int, ...]:
    return (len(range(shape[0])[rows]), *shape[1:])
