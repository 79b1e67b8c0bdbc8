"""The typed configuration of a run: one dataclass per group of `configs/`.

    from recycle_pp.config.settings import Settings, load

    settings = load({"run": {"steps": 100}})   # from plain data; ValueError names the key and what is allowed
    dataclasses.asdict(settings)               # back to plain data

Every field says what it means and its unit; `configs/` holds the defaults that users see. `compose` makes Settings from
a command line, `checks` checks what no type can say.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints


@dataclass
class Model:
    """kind=transformer: a Llama-style decoder (RMSNorm, RoPE, grouped-query attention, SwiGLU, untied embedding and
    head). llama: the same with the sizes and weights of a folder. custom and hf: any model, see docs/models.md; the
    keys from width to dropout are those of the first only."""

    kind: str = "transformer"  # transformer, llama (the project's own; model.path) | custom (model.build) | hf
    layers: int | str | None = 8  # how many, split over the stages; custom, hf: the name of the model's list of layers
    build: str | None = None  # custom: MODULE:FUNCTION that gives the whole model
    loss: str | None = None  # custom: MODULE:FUNCTION of (output, batch); null: output.loss, or the output
    path: str | None = None  # hf, llama: folder with config.json and safetensors; custom: of safetensors to begin with
    init: str = "weights"  # hf, llama: weights (those in model.path) | random (its config.json alone, by run.seed)
    width: int = 64  # hidden size H
    heads: int = 4  # query heads; width % heads == 0
    kv_heads: int = 2  # key and value heads; heads % kv_heads == 0
    head_dim: int | None = None  # of a head; null: width / heads
    ffn: int = 192  # inner size of SwiGLU
    sequence: int = 64  # tokens a sample, T
    vocabulary: int = 256  # 256 for bytes; at least the largest token id + 1; hf: 0 takes that of config.json
    rope_theta: float = 10000.0
    rope_scaling: list[float] | None = (
        None  # llama, as config.json has it: linear [factor], or Llama 3.1's four numbers
    )
    tied: bool = False  # llama: the embedding is the head as well
    qkv_bias: bool = False  # llama: as Qwen2 has it
    qk_norm: bool = False  # llama: as Qwen3 has it
    norm_eps: float = 1e-5
    dropout: float = 0.0  # after attention and after the feed-forward block
    split: list[int] | str | None = "auto"  # layers per stage; null: as even as possible, the first stages take the
    # rest; auto: by measured time and memory where that matters, then the list stands in the run's configuration
    recompute: bool | str = False  # activation checkpointing of every layer; auto: of the stages that have no room
    kernels: str = "auto"  # auto (triton on GPUs) | triton | reference

    @property
    def own(self) -> bool:
        """The project's own Transformer."""
        return self.kind in ("transformer", "llama")

    @property
    def head_size(self) -> int:
        return self.head_dim or self.width // self.heads


@dataclass
class Data:
    path: str | list[str] | None = (
        None  # text, folder, .jsonl, .parquet, .bin, Megatron's, or [A,B]; null: Python's own sources
    )
    weights: list[float] | None = None  # share of the samples that each of several paths gives; null: by their size
    tokenizer: str | None = None  # of text: bytes, a tokenizer.json, or a folder with one; null: its bytes as they are
    separator: str | None = None  # token behind every document; null: the tokenizer's own end of text
    document_mask: bool = False  # attention does not look across a separator; positions begin anew behind it
    column: str = "text"  # of .jsonl and .parquet: where the text is
    dtype: str = "auto"  # of a .bin that does not say it: uint16 | uint32 | auto (uint32 for a vocabulary above 65536)
    validation_path: str | list[str] | None = None  # as path; null: the last part of every path is held out
    validation_share: float = 0.05  # how much of it


@dataclass
class Parallel:
    pipelines: int = 3  # D: how many copies of the model work side by side
    stages: int = 4  # P: how many parts the model is cut into; D * P workers
    microbatches: int = 6  # M, per pipeline; a step always has D * M
    microbatch_size: int = 2  # samples in a micro-batch
    backend: str = "auto"  # auto | tcp | gloo | nccl
    sharded: bool = False  # the optimizer's state is spread over a stage's workers, and not all on each of them
    optimizer_copies: int = 2  # of sharded state: on how many workers each block lies; 0: on all, as without sharded

    memory: str | None = None  # what a worker has, 80GB; auto: its GPU, or its share of the machine or container; null:
    # micro-batches in flight are limited by schedule.memory_extra alone

    @property
    def copies(self) -> int:
        """On how many workers of a stage each block of the optimizer's state lies; 0: on all of them."""
        return self.optimizer_copies if self.sharded else 0


@dataclass
class Schedule:
    backward: str = "mixed"  # with nobody dead: decoupled | coupled (1F1B) | mixed; after a death always mixed
    reroute: str = "failed_only"  # failed_only | any
    memory_extra: int | None = 2  # micro-batches in flight beyond 1F1B's stages - stage; null: no limit
    profile_steps: int = 3  # first steps that measure F, I, W, O for the planner


@dataclass
class Optimizer:
    lr: float = 3e-3  # after the warm-up; large models (model=gpt124m, llama1b) bring a smaller one
    schedule: str = "cosine"  # after the warm-up: cosine | linear (both fall to min_lr) | constant | wsd
    min_lr: float | None = None  # where it ends; null: a tenth of lr
    decay: float = 0.2  # of wsd: share of the steps, the last ones, in which it falls linearly from lr to min_lr
    warmup: int = 10  # steps of linear warm-up
    groups: list[str] | None = None  # PATTERN:LR[:DECAY]: factors of lr and weight_decay for parameters of such a name
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1  # matrices only
    clip: float | None = 1.0  # most global gradient norm; null: no clipping
    most_skipped: int = 5  # steps in a row whose update is skipped (NaN, infinity): then the job stops
    stagger: bool = False  # step before the commit, with an undo copy


@dataclass
class Numerics:
    precision: str = "fp32"  # fp32 | bf16 (weights and activations; float32 masters) | bf16-autocast (matrix products)
    reproducible: bool = False  # fixed-point gradient sums: bit-identical whoever dies
    sums: str = "int64"  # what these are kept in: int64 | int32 (half of the memory; needs reproducible)


@dataclass
class Checkpoint:
    every: int = 0  # steps between checkpoints; 0: as checkpoint.minutes says
    minutes: float = 10.0  # after which the next step brings one; 0: never. The end and a signal always bring one
    keep: int = 2  # newest checkpoints kept
    hf_at_end: bool = False  # the last one also as a Hugging Face folder, run.dir/hf/step-...


@dataclass
class Run:
    steps: int = 60  # optimizer steps of the whole run, over all resumes
    dir: str = "runs/${now:%Y-%m-%d_%H-%M-%S}"  # everything that the run leaves
    resume: bool | str = False  # true: go on from the newest checkpoint in run.dir; auto: if there is one | false
    standby: str = "auto"  # auto (where 400 MB a worker are free) | on | off: the next worker's process waits, imported
    respawns: int = 3  # times a worker that died by itself is started again
    seed: int = 0  # of the initial weights, the order of the samples and the dropout
    device: str = "auto"  # auto | cpu | cuda
    validate_every: int = 20  # steps between validations; 0: never
    validate_samples: int = 32  # held-out samples of a validation, the same in each; rounded up to whole micro-batches
    validate_microbatches: int | None = None  # per pipeline, in place of validate_samples: depends on D
    on_event: str | None = None  # a shell command for every event, which gets it as JSON on its standard input
    sample_log: bool = False  # samples.jsonl: the samples that each step was trained on


@dataclass
class State:
    log: str = "device"  # where what a worker has sent lies until the step is committed: device | host


@dataclass
class Log:
    """Tools that get the metrics and events too, each an extra of the package and a process of its own."""

    tensorboard: bool = False  # run.dir/tensorboard
    wandb: bool = False  # Weights & Biases; offline without an API key
    prometheus: int | None = None  # a port on the coordinator's node; null: none


@dataclass
class Control:
    coordinator: str = "embedded"  # who decides which supervisor coordinates: embedded (their own vote) | etcd
    endpoints: list[str] | None = None  # of etcd: [HOST:PORT, ...], with http:// or https:// before it
    address: str | None = None  # HOST:PORT of the first coordinator; null: one node, found by itself
    interface: str | None = None  # where workers listen for data; null: the one that reaches the coordinator
    heartbeat: float = 0.5  # seconds between heartbeats
    suspicion: float = 10.0  # seconds without progress, or without a heartbeat, until a worker counts as hung
    mismatch: str = "stop"  # holders of a block of sharded state do not agree: stop | third (who is wrong is killed)
    lease: float = 600.0  # seconds that a worker's start, its first ops and the run's last checkpoint may take


@dataclass
class Emulate:
    """`emulate=sleep` replaces compute by sleeping; messages keep their size."""

    mode: str | None = None  # null (real compute) | sleep
    F: float = 0.02  # seconds of a forward
    I: float = 0.02  # of a backward for the input
    W: float = 0.02  # of a backward for the weights
    O: float = 0.06  # of an optimizer step


@dataclass
class Settings:
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    parallel: Parallel = field(default_factory=Parallel)
    schedule: Schedule = field(default_factory=Schedule)
    optimizer: Optimizer = field(default_factory=Optimizer)
    numerics: Numerics = field(default_factory=Numerics)
    state: State = field(default_factory=State)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    run: Run = field(default_factory=Run)
    log: Log = field(default_factory=Log)
    control: Control = field(default_factory=Control)
    emulate: Emulate = field(default_factory=Emulate)
    fail_at: list[str] = field(default_factory=list)  # STEP:D.S[@MOMENT]
    hang_at: list[str] = field(default_factory=list)  # STEP:D.S
    slow_at: list[str] = field(default_factory=list)  # STEP:D.S@FACTOR
    rejoin_at: list[str] = field(default_factory=list)  # STEP:D.S

    @property
    def validation_microbatches(self) -> int:
        """Micro-batches of a validation, if so many are held out."""
        if self.run.validate_microbatches is not None:
            return self.run.validate_microbatches * self.parallel.pipelines
        return -(-self.run.validate_samples // self.parallel.microbatch_size)


LARGEST = 10**18  # whole number that a key may have
FAULTS = ("fail_at", "hang_at", "slow_at", "rejoin_at")

Group = TypeVar("Group")


# ----------------------------------------------------------------------------------------------------- plain data


def load(data: Mapping[str, Any], cls: type[Group] = Settings, prefix: str = "") -> Group:  # type: ignore[assignment]
    """A dataclass from nested plain data; absent keys keep their defaults. ValueError: unknown key or wrong type."""
    hints = get_type_hints(cls)
    values = {}
    for key, value in data.items():
        if key not in hints:
            raise ValueError(_unknown(prefix + str(key), [prefix + name for name in hints]))
        if is_dataclass(hints[key]):
            if not isinstance(value, Mapping):
                raise ValueError(
                    f"{prefix}{key} is a group ({', '.join(get_type_hints(hints[key]))}), not {_show(value)}"
                )
            values[key] = load(value, hints[key], f"{prefix}{key}.")
        elif key in FAULTS and not prefix:
            values[key] = _fault_texts(key, value)
        else:
            values[key] = _typed(prefix + key, value, hints[key])
    return cls(**values)


def known(data: Mapping[str, Any]) -> dict[str, Any]:
    """`data` without keys that no version of now has: those of a run that an earlier version began."""
    groups = {name: hint for name, hint in get_type_hints(Settings).items() if name in data}
    return {
        name: {key: value for key, value in data[name].items() if key in get_type_hints(hint)}
        if is_dataclass(hint) and isinstance(data[name], Mapping)
        else data[name]
        for name, hint in groups.items()
    }


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
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", NoneType: "null"}
    words |= {list[int]: "a list of whole numbers", list[float]: "a list of numbers", list[str]: "a list of texts"}
    expected = " or ".join(words[kind] for kind in allowed)
    raise ValueError(f"{key} must be {expected}, not {_show(value)}")


def _fault_texts(key: str, value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    for item in values:
        if isinstance(item, int | float) and not isinstance(item, bool) and abs(item) < LARGEST:
            step, rest = divmod(round(item, 6), 60)  # YAML 1.1 reads a:b as 60 a + b
            guess = f"{int(step)}:{round(rest, 6):g}"
            raise ValueError(
                f"{key} is the number {item}: YAML reads an unquoted 20:1.2 as a base-60 number; "
                f'put it in quotes, {key}: "{guess if "." in guess else "20:1.2"}"'
            )
        if not isinstance(item, str):
            raise ValueError(f"{key} must be STEP:D.S or a list of such, for instance 20:1.2, not {_show(item)}")
    return values


def _unknown(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(known)}"
    return f"{key} is no key of the configuration; {hint}"


def _show(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
