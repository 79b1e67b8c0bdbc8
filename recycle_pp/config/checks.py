"""Checks that a job can run with its settings. A failed check raises ValueError, with one sentence that names the key
and the allowed values.

    validate(settings, world=12)   # raises ValueError

`loading.load` has already rejected unknown keys and wrong types, and each setting has its own rule (`setting.py`). The
checks in this file concern several keys at once: shapes that do not match, missing data, workers that do not exist.
They read no data and do not import torch, because they run before any worker starts.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import asdict
from pathlib import Path

from recycle_pp.storage.local_copy import is_stored, place

from .faults import faults
from .loading import flat
from .setting import rules, shown
from .settings import FAULTS, Data, Model, Settings

MOST_INT32_TERMS = 64  # largest number of micro-batches in a step with numerics.sums=int32, see int32_bits
MOST_WORKERS = 1_000_000
# bf16 keeps 8 bits, so a mean that changes by less than 2^-8 of its value in a step may round back to its old value.
MOST_BF16_DECAY = 0.996


def validate(settings: Settings, world: int | None = None) -> None:
    """Raises ValueError if a job cannot run with these settings. The sentence names the key and the allowed values.

    world: number of launched processes, which must fit the shape; None: not checked
    """
    _validate_model(settings.model)
    check_ranges(settings)
    check_values(settings)
    _validate_optimizer(settings)
    _validate_shape(settings, world)
    _validate_data(settings)
    _validate_sources(settings)
    faults(settings if settings.run.epochs is None else settings.with_values({"run.steps": sys.maxsize}))


def _validate_model(model: Model) -> None:
    """Checks that the kind of the model allows the keys that are set. The workers check whether the model can be built
    and cut."""
    kind, layers = model.kind, model.layers
    if model.lora.rank and (kind != "hf" or model.init != "weights"):
        raise ValueError(
            "model.lora.rank above 0 needs model=hf and model.init=weights: adapters are trained on top of the weights "
            "in model.path"
        )
    if kind == "custom":
        for key in ("build", "loss"):
            value = getattr(model, key)
            if (value is not None or key == "build") and not re.fullmatch(r"[\w.]+:\w+", value or ""):
                raise ValueError(
                    f"model.{key} must be MODULE:FUNCTION with model=custom, for instance my_package:{key}, "
                    f"not {value or 'null'}"
                )
        if not isinstance(layers, str):
            raise ValueError(
                f"model.layers must be the name of the model's list of layers with model=custom, not {layers}".replace(
                    "None", "null"
                )
            )
        return
    if kind != "llama":
        for key in ("tied", "qkv_bias", "qk_norm", "rope_scaling"):
            if getattr(model, key):
                raise ValueError(f"model.{key} belongs to model=llama, whose config.json sets it; leave it out here")
    for key in ("build", "loss", "path") if kind == "transformer" else ("build", "loss"):
        if getattr(model, key) is not None:
            raise ValueError(f"model.{key} needs model={'hf' if key == 'path' else 'custom'}; it must be null here")
    if kind in ("hf", "llama"):
        _validate_folder(model)
    if kind == "hf":
        if isinstance(layers, int):
            raise ValueError(
                f"model.layers must be null or a name with model=hf (config.json has the number), not {layers}"
            )
    elif not isinstance(layers, int) or layers < 1:
        raise ValueError(f"model.layers must be a whole number of at least 1, not {layers}".replace("None", "null"))


def _validate_folder(model: Model) -> None:
    folder = model.folder or Path()
    if not model.path or not (folder / "config.json").is_file():
        raise ValueError(f"model.path must name a folder with a config.json, not {model.path}".replace("None", "null"))
    if model.init == "weights" and not is_stored(model.path) and not any(folder.glob("model*.safetensors")):
        raise ValueError(
            f"model.path={model.path} contains no model.safetensors; use model.init=random to train from random weights"
        )


def check_ranges(settings: Settings) -> None:
    """Raises ValueError if the rule of a setting (`setting.py`) does not allow its value. Ignores other keys.

    A run's config.yaml must pass only this check. Other checks depend on files, and the run may have started on another
    machine.
    """
    values = flat(asdict(settings))
    for key, rule in rules(Settings).items():
        if key not in FAULTS:
            rule.check(key, values[key])
    if settings.parallel.pipelines * settings.parallel.stages > MOST_WORKERS:
        raise ValueError(f"parallel.pipelines * parallel.stages must be at most {MOST_WORKERS:,} workers")


def check_values(settings: Settings) -> None:
    """Raises ValueError if values that are allowed on their own cannot be combined."""
    if settings.model.vocabulary < 1:
        raise ValueError(f"model.vocabulary must be at least 1, not {settings.model.vocabulary}")
    if settings.model.recompute == "auto" and settings.parallel.memory is None:
        raise ValueError("model.recompute=auto needs parallel.memory, on which the choice depends")
    if settings.schedule.rebalance == "auto" and not settings.schedule.profile_steps and not settings.emulate.mode:
        raise ValueError("schedule.rebalance=auto needs schedule.profile_steps above 0, because it uses measured times")
    if settings.control.suspicion <= settings.control.heartbeat:
        raise ValueError(
            f"control.suspicion must be above control.heartbeat = {settings.control.heartbeat}, "
            f"not {settings.control.suspicion}"
        )
    _validate_sums(settings)
    _validate_sharded(settings)
    _validate_islands(settings)
    if settings.control.coordinator == "etcd" and not settings.control.endpoints:
        raise ValueError("control.endpoints must be a list of HOST:PORT with control.coordinator=etcd")
    if settings.parallel.backend == "nccl" and settings.run.device == "cpu":
        raise ValueError("parallel.backend=nccl needs GPUs: with run.device=cpu it must be auto, tcp or gloo")


def _validate_sums(settings: Settings) -> None:
    """Checks what `numerics.fixed_point` requires. That module cannot be imported here because it imports torch."""
    if settings.numerics.sums != "int32":
        return
    if not settings.numerics.reproducible:
        raise ValueError("numerics.sums=int32 needs numerics.reproducible=true: without it sums are float32")
    terms = settings.parallel.pipelines * settings.parallel.microbatches
    if terms > MOST_INT32_TERMS:
        raise ValueError(
            f"numerics.sums=int32 sums at most {MOST_INT32_TERMS} micro-batches a step, so that the largest element of "
            f"a row keeps 16 bits; parallel.pipelines * parallel.microbatches is {terms}"
        )


def _validate_sharded(settings: Settings) -> None:
    """Rejects settings that cannot be combined with sharded optimizer state, and those that need it if it is off."""
    parallel = settings.parallel
    if not parallel.copies:
        if settings.control.mismatch != "stop":
            raise ValueError(
                "control.mismatch=third needs parallel.sharded=true and parallel.optimizer_copies above 0: without "
                "them, workers do not compare their copies in each step"
            )
        return
    if settings.optimizer.stagger and settings.control.mismatch != "stop":
        raise ValueError("control.mismatch=third cannot be combined with optimizer.stagger; remove one of them")
    if settings.emulate.mode:
        raise ValueError("parallel.sharded needs real compute: it must be false with emulate=sleep")


def _validate_islands(settings: Settings) -> None:
    islands = settings.islands
    if islands.store is None:
        if islands.name is not None:
            raise ValueError(f"islands.name={islands.name} needs islands.store, through which islands exchange updates")
        return
    if islands.name is None:
        raise ValueError("islands.store needs islands.name: a name that no other island has")
    if islands.bits not in (8, 32):
        raise ValueError(f"islands.bits must be 8 or 32, not {islands.bits}")
    layers, each = settings.model.layers, "" if islands.fragments == 1 else " / islands.fragments"
    if islands.steps % islands.fragments:
        raise ValueError(f"islands.fragments must divide islands.steps = {islands.steps}, not {islands.fragments}")
    if isinstance(layers, int) and islands.fragments > layers:
        raise ValueError(f"islands.fragments must be at most model.layers = {layers}, not {islands.fragments}")
    if islands.delay > islands.every:
        raise ValueError(f"islands.delay must be at most islands.steps{each} = {islands.every}, not {islands.delay}")
    least = islands.every + islands.delay - 1
    if islands.most_local < least:
        raise ValueError(
            f"islands.max_local must be at least islands.steps{each} + islands.delay - 1 = {least}, "
            f"not {islands.max_local}"
        )
    for key, needed, given in (
        ("optimizer.stagger", "false", settings.optimizer.stagger),
        ("state.understudy", "never", settings.state.understudy != "never"),
        ("schedule.rebalance", "never", settings.schedule.rebalance != "never"),
        ("emulate.mode", "null", settings.emulate.mode is not None),
    ):
        if given:
            raise ValueError(f"{key} must be {needed} with islands.store")


def int32_bits(terms: int) -> int:
    """The value of `numerics.fixed_point.INT32.kept`, computed without torch."""
    return 22 - (terms - 1).bit_length()


def _validate_optimizer(settings: Settings) -> None:
    optimizer = settings.optimizer
    if optimizer.name == "custom" and not re.fullmatch(r"[\w.]+:\w+", optimizer.build or ""):
        raise ValueError(
            "optimizer.build must be MODULE:NAME with optimizer.name=custom, for instance my_package:build, "
            f"not {optimizer.build or 'null'}"
        )
    if optimizer.name != "custom" and optimizer.build is not None:
        raise ValueError("optimizer.build needs optimizer.name=custom; it must be null here")
    if (optimizer.min_lr or 0.0) > optimizer.lr:
        raise ValueError(f"optimizer.min_lr must be at most optimizer.lr = {optimizer.lr}, not {optimizer.min_lr}")
    decays = {"beta1": optimizer.beta1, "beta2": optimizer.beta2, "muon.momentum": optimizer.muon.momentum}
    for key, decay in decays.items() if optimizer.moments == "bf16" else ():
        if decay > MOST_BF16_DECAY:
            raise ValueError(
                f"optimizer.{key} must be at most {MOST_BF16_DECAY} with optimizer.moments=bf16, not {decay}: a slower "
                "decay is lost when bf16 rounds it"
            )


def _validate_shape(settings: Settings, world: int | None) -> None:
    model, parallel = settings.model, settings.parallel
    split = model.split
    if isinstance(split, list) and (len(split) != parallel.stages or min(split) < 1):
        raise ValueError(
            f"model.split must be auto, null or parallel.stages = {parallel.stages} numbers above 0, not {split}"
        )
    if model.own:
        _validate_transformer(model, parallel.stages)
    needed = parallel.pipelines * parallel.stages
    if world is not None and world != needed:
        raise ValueError(
            f"parallel.pipelines * parallel.stages = {parallel.pipelines} * {parallel.stages} = {needed} workers, "
            f"but {world} {'process was' if world == 1 else 'processes were'} launched; "
            f"use torchrun --nproc-per-node={needed}, or change the numbers of pipelines and stages"
        )


def _validate_transformer(model: Model, stages: int) -> None:
    assert isinstance(model.layers, int)
    if model.head_dim is None and model.width % model.heads:
        raise ValueError(f"model.heads must divide model.width = {model.width}, but {model.heads} does not")
    if model.head_size % 2 or model.head_size < 1:
        of = "model.width / model.heads" if model.head_dim is None else "model.head_dim"
        raise ValueError(f"{of} must be even (RoPE rotates pairs), not {model.head_size}")
    if model.heads % model.kv_heads:
        raise ValueError(f"model.kv_heads must divide model.heads = {model.heads}, but {model.kv_heads} does not")
    if model.layers < stages:
        raise ValueError(f"model.layers must be at least parallel.stages = {stages}, one per stage, not {model.layers}")
    if isinstance(model.split, list) and sum(model.split) != model.layers:
        raise ValueError(
            f"model.split must add up to model.layers = {model.layers}; {model.split} adds up to {sum(model.split)}"
        )


def _validate_sources(settings: Settings) -> None:
    """Checks that the keys about data match. `recycle_pp.data` checks the content of the files."""
    data = settings.data
    sources = _listed(data.path)
    if not sources:
        raise ValueError("data.path must name at least one source, not []")
    if data.weights is not None and len(data.weights) != len(sources):
        raise ValueError(
            f"data.weights must be null or one number for each of the {len(sources)} sources of data.path, "
            f"not {len(data.weights)}"
        )
    if data.separator is not None and data.tokenizer is None:
        raise ValueError("data.separator needs a data.tokenizer: raw bytes have no separator")
    if data.build is not None:
        _validate_own(settings)
    else:
        _validate_bytes(settings)
    if data.format == "chat":
        _validate_chat(settings)
    if settings.checkpoint.store is not None and settings.emulate.mode:
        raise ValueError("checkpoint.store needs real compute: it must be null with emulate=sleep")
    if settings.checkpoint.keep_best and not settings.run.validate_every:
        raise ValueError("checkpoint.keep_best needs run.validate_every above 0, because it compares validation losses")
    for key, off, wanted in (
        ("checkpoint.hf_at_end", "false", settings.checkpoint.hf_at_end),
        ("run.evaluate", "null", settings.run.evaluate),
    ):
        if wanted and settings.emulate.mode:
            raise ValueError(f"{key} needs real compute: it must be {off} with emulate=sleep")
        if wanted and importlib.util.find_spec("safetensors") is None:
            raise ValueError(f"{key} needs the package safetensors; pip install -e '.[hf]' in the clone of recycle_pp")


def _validate_own(settings: Settings) -> None:
    data, default = asdict(settings.data), asdict(Data())
    for key in ("format", "path", "weights", "document_mask", "validation_path"):
        if data[key] != default[key]:
            raise ValueError(f"data.{key} must be {shown(default[key])} with data.build, not {shown(data[key])}")


def _validate_chat(settings: Settings) -> None:
    data = settings.data
    if data.path is None:
        raise ValueError(
            "data.format=chat needs a data.path: .jsonl or .parquet with messages, or prompt and completion"
        )
    if data.tokenizer == "bytes" or (data.tokenizer is None and not str(data.path).endswith(".bin")):
        raise ValueError(
            f"data.tokenizer must be a folder with a tokenizer.json and a chat template with data.format=chat, not "
            f"{data.tokenizer or 'null'}"
        )
    if data.separator is not None:
        raise ValueError("data.separator must be null with data.format=chat: the chat template separates conversations")


def _validate_bytes(settings: Settings) -> None:
    """Raises ValueError if a pretrained model that has its own tokenizer would be trained on bytes."""
    model, data = settings.model, settings.data
    pretrained = (
        model.kind in ("hf", "llama")
        and model.init == "weights"
        and ((model.folder or Path()) / "tokenizer.json").is_file()
    )
    known = [path for path in _listed(data.path) if path is None or not _awaited(path)]
    text = any(path is None or (not path.endswith(".bin") and not _is_megatron(place(path))) for path in known)
    if pretrained and text and data.tokenizer is None:
        raise ValueError(
            f"data.tokenizer must be set, for instance to model.path={model.path}: the weights in that folder were not "
            "trained on bytes"
        )


def _validate_data(settings: Settings) -> None:
    """Checks that data from the hub have a tokenizer. If a single path has none, checks that its files are large
    enough, without reading them."""
    data, vocabulary = settings.data, settings.model.vocabulary
    for source in (*_listed(data.path), *_listed(data.validation_path)):
        if data.tokenizer is None and (source or "").startswith("hf://"):
            raise ValueError(f"{source} needs a data.tokenizer: a dataset from the hub contains text")
    if isinstance(data.path, list) or data.tokenizer is not None or data.validation_path is not None:
        return
    if data.format == "chat" or data.build is not None:
        return
    if data.path is not None and _awaited(data.path):
        return
    path = place(data.path) if data.path is not None else None
    if path is not None and _is_megatron(path):
        return
    if (path is None or path.suffix != ".bin") and vocabulary < 256:
        raise ValueError(f"model.vocabulary must be at least 256 for text (bytes), not {vocabulary}")
    if path is None:
        return
    if not data.path or not path.exists():
        raise ValueError(f"data.path must name a text file, a folder of text or a .bin file, not {data.path!r}")
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    if size == 0:
        raise ValueError(f"data.path must contain data; {data.path!r} is empty")
    if path.suffix == ".bin":  # from here on, the size is in tokens
        size //= 4 if data.dtype == "uint32" or (data.dtype == "auto" and vocabulary > 1 << 16) else 2
    held_out = int(size * data.validation_share)
    sample = settings.model.sequence + 1
    if size - held_out < sample:
        raise ValueError(
            f"data.path must contain at least one sample of model.sequence + 1 = {sample} tokens in addition to the "
            f"held-out part; {data.path!r} contains {size - held_out}"
        )
    needed = settings.model.sequence * settings.parallel.microbatch_size + 1
    if settings.run.validate_every and held_out < needed:
        raise ValueError(
            f"data.validation_share must leave at least {needed} held-out tokens (one micro-batch), but it leaves "
            f"{held_out} of {data.path!r}; raise it, or set run.validate_every=0"
        )


def _listed(path: str | list[str] | None) -> list[str | None]:
    return [*path] if isinstance(path, list) else [path]


def _awaited(path: str) -> bool:
    """Whether the path names objects of a store that this machine has not copied yet."""
    return is_stored(path) and not place(path).exists()


def _is_megatron(path: Path) -> bool:
    return Path(str(path).removesuffix(".idx").removesuffix(".bin") + ".idx").is_file()
