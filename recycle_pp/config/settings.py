"""The typed configuration of a run: one dataclass for each group of `configs/`.

    from recycle_pp.config.settings import Settings, load

    settings = load({"run": {"steps": 100}})   # from plain data; ValueError names the key and the allowed values
    dataclasses.asdict(settings)               # back to plain data

The comment on a field states its meaning and unit; `--help` prints these comments. `configs/` holds the defaults.
`compose` builds Settings from a command line. `checks` validates ranges and combinations that a type cannot express.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints


@dataclass
class Model:
    """
    kind=transformer   Llama-style decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU, untied embedding and head
    kind=llama         the same decoder with the sizes and weights of a Hugging Face folder
    kind=custom, hf    any model (docs/models.md); the keys from width to dropout do not apply
    """

    kind: str = "transformer"  # transformer | llama (this project's decoders; llama reads model.path) | custom
    # (model.build) | hf
    layers: int | str | None = 8  # number of layers in the whole model; custom, hf: the name of the model's list of
    # layers
    build: str | None = None  # custom: MODULE:FUNCTION that returns the whole model
    loss: str | None = None  # custom: MODULE:FUNCTION of (output, batch); null: output.loss, or the output itself
    path: str | None = None  # hf, llama: folder with config.json and safetensors; custom: folder with initial
    # safetensors
    init: str = "weights"  # hf, llama: weights (load those in model.path) | random (read only config.json; weights
    # drawn from run.seed)
    width: int = 64  # hidden size H
    heads: int = 4  # query heads; width % heads == 0
    kv_heads: int = 2  # key and value heads; heads % kv_heads == 0
    head_dim: int | None = None  # size of one head; null: width / heads
    ffn: int = 192  # inner size of SwiGLU
    sequence: int = 64  # tokens per sample, T
    vocabulary: int = 256  # number of token ids: 256 for bytes, else at least the largest token id + 1; hf: 0 reads
    # config.json
    rope_theta: float = 10000.0  # base of the rotary position embedding
    rope_scaling: list[float] | None = None  # llama, as in config.json: linear [factor], or Llama 3.1's four numbers
    tied: bool = False  # llama: the head shares the weights of the embedding
    qkv_bias: bool = False  # llama: bias on the query, key and value projections, as in Qwen2
    qk_norm: bool = False  # llama: RMSNorm on queries and keys, as in Qwen3
    norm_eps: float = 1e-5  # added to the mean square in RMSNorm
    dropout: float = 0.0  # probability, after attention and after the feed-forward block
    split: list[int] | str | None = "auto"  # layers per stage; null: as even as possible, with the remainder on the
    # first stages; auto: balanced by measured time and memory if even stages are not the best, then saved in
    # config.yaml
    recompute: bool | str = False  # activation checkpointing of every layer; auto: only at the stages that lack memory
    # without it
    kernels: str = "auto"  # auto (triton on GPUs) | triton | reference

    @property
    def own(self) -> bool:
        """True if the model is this project's own Transformer."""
        return self.kind in ("transformer", "llama")

    @property
    def head_size(self) -> int:
        return self.head_dim or self.width // self.heads


@dataclass
class Data:
    path: str | list[str] | None = None  # text file, folder, .jsonl, .parquet, .bin or Megatron's .bin/.idx prefix, or
    # a list of them, [A,B]; null: the source files of Python
    weights: list[float] | None = None  # relative number of samples from each path of a list; null: in proportion to
    # their sizes
    tokenizer: str | None = None  # for text: bytes, a tokenizer.json, or a folder with one; null: the bytes of the
    # files, without documents
    separator: str | None = None  # token after every document; null: the tokenizer's end-of-text token
    document_mask: bool = False  # attention does not cross a separator; positions restart after it
    column: str = "text"  # for .jsonl and .parquet: the column that holds the text
    dtype: str = "auto"  # for a .bin without a header: uint16 | uint32 | auto (uint32 if the vocabulary exceeds 65536)
    validation_path: str | list[str] | None = None  # validation data, like data.path; null: the end of every path is
    # held out
    validation_share: float = 0.05  # share of each path that is held out for validation


@dataclass
class Parallel:
    pipelines: int = 3  # D: copies of the model that train in parallel
    stages: int = 4  # P: parts into which the model is cut; a job has D * P workers
    microbatches: int = 6  # M: micro-batches per pipeline; a step always has D * M
    microbatch_size: int = 2  # samples per micro-batch
    backend: str = "auto"  # auto | tcp | gloo | nccl: the transport for tensors
    sharded: bool = False  # shard the optimizer state over the workers of a stage, instead of replicating it
    optimizer_copies: int = 2  # with sharded: workers that hold a copy of each block; 0: all workers of the stage

    memory: str | None = None  # memory of a worker, like 80GB; auto: its GPU, or its share of the machine or container;
    # null: unknown, so only schedule.memory_extra limits the micro-batches in flight

    @property
    def copies(self) -> int:
        """Workers of a stage that hold a copy of each block of optimizer state; 0: all of them."""
        return self.optimizer_copies if self.sharded else 0


@dataclass
class Schedule:
    backward: str = "mixed"  # before any death: decoupled | coupled (1F1B) | mixed; after a death always mixed
    reroute: str = "failed_only"  # micro-batches that may move to a peer: failed_only (those of dead workers) | any
    memory_extra: int | None = 2  # micro-batches in flight beyond the `stages - stage` of 1F1B; null: no limit
    profile_steps: int = 3  # number of first steps in which F, I, W and O are measured for the planner


@dataclass
class Optimizer:
    lr: float = 3e-3  # peak, after the warm-up; large models (model=gpt124m, llama1b) set a smaller one
    schedule: str = "cosine"  # after the warm-up: cosine | linear (both fall to min_lr) | constant | wsd
    min_lr: float | None = None  # value at the end of cosine, linear and wsd; null: a tenth of lr
    decay: float = 0.2  # wsd: final share of the steps, in which lr falls linearly to min_lr
    warmup: int = 10  # steps of linear warm-up
    groups: list[str] | None = None  # PATTERN:LR[:DECAY]: factors of lr and weight_decay for parameters whose name
    # matches
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1  # matrices only
    clip: float | None = 1.0  # largest global gradient norm; null: no clipping
    most_skipped: int = 5  # stop the job after this many consecutive updates skipped for NaN or infinity
    stagger: bool = False  # step each stage before the commit, and keep an undo copy


@dataclass
class Numerics:
    precision: str = "fp32"  # fp32 | bf16 (weights and activations; float32 masters) | bf16-autocast (matrix products)
    reproducible: bool = False  # fixed-point gradient sums: bit-identical results whichever workers die
    sums: str = "int64"  # integers that hold these sums: int64 | int32 (half the memory; needs reproducible)


@dataclass
class Checkpoint:
    every: int = 0  # steps between checkpoints; 0: by checkpoint.minutes only
    minutes: float = 10.0  # minutes between checkpoints; 0: never. The end of a run and a signal always write one
    keep: int = 2  # number of newest checkpoints to keep
    hf_at_end: bool = False  # also export the last checkpoint to run.dir/hf/step-... in Hugging Face format


@dataclass
class Run:
    steps: int = 60  # optimizer steps of the whole run, including resumes
    dir: str = "runs/${now:%Y-%m-%d_%H-%M-%S}"  # folder for all files of the run
    resume: bool | str = False  # true: resume the newest checkpoint in run.dir; auto: resume if there is one | false
    standby: str = "auto"  # start the next process of each worker in advance: auto (if 400 MB per worker are free) | on
    # | off
    respawns: int = 3  # most restarts of a worker that died on its own
    seed: int = 0  # seed of the initial weights, sample order and dropout
    device: str = "auto"  # auto | cpu | cuda
    validate_every: int = 20  # steps between validations; 0: never
    validate_samples: int = 32  # held-out samples per validation, always the same; rounded up to whole micro-batches
    validate_microbatches: int | None = None  # held-out micro-batches per pipeline, instead of validate_samples; the
    # total depends on D
    on_event: str | None = None  # shell command run for every event, with the event as JSON on standard input
    sample_log: bool = False  # write samples.jsonl: the sample ids of each step


@dataclass
class State:
    log: str = "device"  # where a worker keeps sent tensors until the step commits: device | host


@dataclass
class Log:
    """Exporters of metrics and events. Each needs an extra of the package and runs in its own process."""

    tensorboard: bool = False  # write run.dir/tensorboard
    wandb: bool = False  # Weights & Biases; offline without an API key
    prometheus: int | None = None  # port on the coordinator's node; null: off


@dataclass
class Control:
    coordinator: str = "embedded"  # how supervisors elect the coordinator: embedded (they vote) | etcd
    endpoints: list[str] | None = None  # for etcd: [HOST:PORT, ...], optionally with http:// or https://
    address: str | None = None  # HOST:PORT of the first coordinator; null: a single node, which needs no address
    interface: str | None = None  # network interface or address for data; null: the one that reaches the coordinator
    heartbeat: float = 0.5  # seconds between heartbeats
    suspicion: float = 10.0  # seconds without progress or heartbeats after which a worker counts as hung
    mismatch: str = "stop"  # copies of a block of sharded state differ: stop | third (kill the worker with the wrong
    # copy)
    lease: float = 600.0  # seconds allowed for a worker's start, its first ops and the run's last checkpoint


@dataclass
class Emulate:
    """`emulate=sleep` replaces computation by sleeping. Messages keep their sizes."""

    mode: str | None = None  # null (real compute) | sleep
    F: float = 0.02  # seconds of a forward
    I: float = 0.02  # seconds of a backward for the input
    W: float = 0.02  # seconds of a backward for the weights
    O: float = 0.06  # seconds of an optimizer step


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
    fail_at: list[str] = field(default_factory=list)  # STEP:D.S[@MOMENT]: kill a worker
    hang_at: list[str] = field(default_factory=list)  # STEP:D.S[@MOMENT]: suspend a worker
    slow_at: list[str] = field(default_factory=list)  # STEP:D.S@FACTOR: slow a worker down
    rejoin_at: list[str] = field(default_factory=list)  # STEP:D.S: restart a worker that fail_at or hang_at stopped

    @property
    def validation_microbatches(self) -> int:
        """Micro-batches of a validation, if the held-out data has as many."""
        if self.run.validate_microbatches is not None:
            return self.run.validate_microbatches * self.parallel.pipelines
        return -(-self.run.validate_samples // self.parallel.microbatch_size)


LARGEST = 10**18  # largest absolute value of a whole number
FAULTS = ("fail_at", "hang_at", "slow_at", "rejoin_at")

Group = TypeVar("Group")


# ----------------------------------------------------------------------------------------------------- plain data


def load(data: Mapping[str, Any], cls: type[Group] = Settings, prefix: str = "") -> Group:  # type: ignore[assignment]
    """A dataclass built from nested plain data. Absent keys keep their defaults.

    Raises:
        ValueError: an unknown key or a value of the wrong type.
    """
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
    """`data` without the keys that this version does not have, for runs that an older version started."""
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
            step, rest = divmod(round(item, 6), 60)  # YAML 1.1 parses a:b as 60 a + b
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
