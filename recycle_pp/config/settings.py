"""The typed configuration of a run: one dataclass for each group of `configs/`.

    Settings().with_values({"run.steps": 100})     # a changed copy, because settings are immutable
    dataclasses.asdict(settings)                   # plain data; `loading.load` is the inverse

A setting's rule (`setting.py`) states its meaning and unit, its allowed values, and when it may change. `configs/`
holds the defaults. `compose` builds Settings from a command line. `checks` validates combinations of several settings.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from recycle_pp.storage.local_copy import place

from .setting import Change, fixed, setting
from .sizes import parse_size

YES_NO_AUTO = (True, False, "auto")


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters of a Hugging Face decoder, through peft. All other parameters are frozen."""

    rank: int = fixed(0, "hf: inner dimension of an adapter; 0: no adapters, all parameters train", at_least=0)
    alpha: float = fixed(16.0, "the output of an adapter is scaled by alpha / rank", above=0)
    targets: list[str] | str = fixed(
        "all-linear",
        "suffixes of the names of adapted modules, for instance [q_proj,v_proj]; a string is a regular expression for "
        "the whole name; all-linear: every linear module but the head",
    )
    dropout: float = fixed(0.0, "dropout probability at the input of an adapter", at_least=0, below=1)


@dataclass(frozen=True)
class Model:
    """The model to train.

    kind=transformer   Llama-style decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU, untied embedding and head
    kind=llama         the same decoder with the sizes and weights of a Hugging Face folder
    kind=custom, hf    any model (docs/models.md); the keys from width to dropout do not apply
    """

    kind: str = fixed(
        "transformer",
        "transformer and llama: this project's decoders; llama reads model.path. custom: model.build. hf: transformers",
        choices=("transformer", "llama", "custom", "hf"),
    )
    layers: int | str | None = fixed(
        8, "number of layers in the whole model; custom, hf: the name of the model's list of layers"
    )
    build: str | None = fixed(None, "custom: MODULE:FUNCTION that returns the whole model")
    loss: str | None = fixed(
        None, "custom: MODULE:FUNCTION of (output, batch); null: output.loss, or the output itself"
    )
    path: str | None = fixed(
        None,
        "hf, llama: folder with config.json and safetensors; custom: folder with initial safetensors; or the URL of "
        "such a folder, s3://, gs:// or az://",
    )
    init: str = fixed(
        "weights",
        "hf, llama: weights loads those in model.path; random reads only config.json and draws weights from run.seed",
        choices=("weights", "random"),
    )
    width: int = fixed(64, "hidden size H", at_least=1)
    heads: int = fixed(4, "query heads; they divide model.width", at_least=1)
    kv_heads: int = fixed(2, "key and value heads; they divide model.heads", at_least=1)
    head_dim: int | None = fixed(None, "size of one head; null: width / heads")
    ffn: int = fixed(192, "inner size of SwiGLU", at_least=1)
    sequence: int = fixed(64, "tokens per sample, T", at_least=1)
    vocabulary: int = fixed(
        256,
        "number of token ids: 256 for bytes, else at least the largest token id + 1; hf: 0 reads config.json",
        at_least=0,
    )
    rope_theta: float = fixed(10000.0, "base of the rotary position embedding", above=0)
    rope_scaling: list[float] | None = fixed(
        None, "llama, as in config.json: linear [factor], or Llama 3.1's four numbers"
    )
    tied: bool = fixed(False, "llama: the head shares the weights of the embedding")
    qkv_bias: bool = fixed(False, "llama: bias on the query, key and value projections, as in Qwen2")
    qk_norm: bool = fixed(False, "llama: RMSNorm on queries and keys, as in Qwen3")
    norm_eps: float = fixed(1e-5, "added to the mean square in RMSNorm", above=0)
    dropout: float = fixed(0.0, "probability, after attention and after the feed-forward block", at_least=0, below=1)
    split: list[int] | str | None = setting(
        "auto",
        "layers per stage; null: as even as possible, with the remainder on the first stages; auto: balanced by "
        "numbers of weights, within parallel.memory; schedule.rebalance changes a list only while a worker is dead",
        choices=("auto", None),
        form="a list of whole numbers",
    )
    auto_split: list[int] | None = setting(
        None, "set automatically at the start: the layers per stage that split=auto chose", change=Change.START
    )
    recompute: bool | str = setting(
        False,
        "activation checkpointing of every layer; auto: only at the stages that lack memory without it",
        choices=YES_NO_AUTO,
    )
    kernels: str = setting("auto", "auto: triton on GPUs", choices=("auto", "triton", "reference"))
    lora: Lora = field(default_factory=Lora)

    @property
    def own(self) -> bool:
        """Whether the model is this project's own Transformer."""
        return self.kind in ("transformer", "llama")

    @property
    def folder(self) -> Path | None:
        """The folder at `path`. If `path` is a URL, the copy of that folder on this machine."""
        return None if self.path is None else place(self.path)

    @property
    def layout(self) -> list[int] | None:
        """Layers per stage at the start of the job; None: as even as possible."""
        chosen = self.auto_split if self.split == "auto" else self.split
        return chosen if isinstance(chosen, list) else None

    @property
    def head_size(self) -> int:
        return self.head_dim or self.width // self.heads


@dataclass(frozen=True)
class Data:
    format: str = fixed(
        "text",
        "chat: conversations, through the chat template of data.tokenizer; only the assistant's tokens have a loss",
        choices=("text", "chat"),
    )
    build: str | None = fixed(
        None,
        "MODULE:FUNCTION that returns a dataset: __len__, and __getitem__ with tensors by name; instead of data.path",
        pattern=r"[\w.]+:\w+",
        form="null or MODULE:FUNCTION, for instance my_package:dataset",
    )
    path: str | list[str] | None = fixed(
        None,
        "text file, folder, .jsonl, .parquet, .bin, Megatron's .bin/.idx prefix, a dataset's folder, hf://NAME:SPLIT, "
        "s3://, gs:// or az:// of such a file or folder, or a list of them, [A,B]; null: the source files of Python",
    )
    weights: list[float] | None = fixed(
        None, "relative number of samples from each path of a list; null: in proportion to their sizes", above=0
    )
    tokenizer: str | None = fixed(
        None,
        "for text: bytes, a tokenizer.json, or a folder with one; null: the raw bytes of the files, without "
        "document boundaries",
    )
    separator: str | None = fixed(None, "token after every document; null: the tokenizer's end-of-text token")
    document_mask: bool = fixed(
        False,
        "attention does not cross a separator; positions restart after it; chat: always on, between conversations",
    )
    column: str = fixed(
        "text",
        "column of .jsonl and .parquet files with the text; chat: with the messages (the default, text, then means "
        "messages)",
    )
    dtype: str = fixed(
        "auto",
        "dtype of a .bin without a header; auto: uint32 if the vocabulary exceeds 65536",
        choices=("auto", "uint16", "uint32"),
    )
    validation_path: str | list[str] | None = fixed(
        None, "validation data, like data.path; null: the end of every path is held out"
    )
    validation_share: float = fixed(0.05, "share of each path that is held out for validation", at_least=0, below=1)

    @property
    def masked(self) -> bool:
        """Whether attention stays within each document of a sample."""
        return self.document_mask or self.format == "chat"

    @property
    def unmasked(self) -> str:
        """The beginning of the error message for a model whose attention cannot be kept within a document."""
        return "data.format must be text" if self.format == "chat" else "data.document_mask must be false"


@dataclass(frozen=True)
class Parallel:
    pipelines: int = setting(3, "D: copies of the model that train in parallel", at_least=1)
    stages: int = setting(4, "P: parts into which the model is cut; a job has D * P workers", at_least=1)
    microbatches: int = setting(
        6, "M: micro-batches per pipeline; a step always has D * M, also after a resume", at_least=1
    )
    microbatch_size: int = fixed(2, "samples per micro-batch", at_least=1)
    backend: str = setting("auto", "the transport for tensors", choices=("auto", "tcp", "gloo", "nccl"))
    sharded: bool = setting(False, "shard the optimizer state over the workers of a stage, instead of replicating it")
    optimizer_copies: int = setting(
        2, "with sharded: workers that hold a copy of each unit; 0: all workers of the stage", at_least=0
    )
    memory: str | None = setting(
        None,
        "memory of a worker; auto: its GPU, or its share of the machine or container; null: unknown, so only "
        "schedule.memory_extra limits the micro-batches in flight",
        choices=("auto", None),
        form="a size like 80GB",
        parse=parse_size,
    )

    @property
    def copies(self) -> int:
        """Number of workers of a stage that hold a copy of each unit of state; 0: all workers of the stage."""
        return self.optimizer_copies if self.sharded else 0


@dataclass(frozen=True)
class Schedule:
    backward: str = setting(
        "mixed",
        "how backwards run before any death; coupled: 1F1B; after a death always mixed",
        choices=("decoupled", "coupled", "mixed"),
    )
    reroute: str = setting(
        "failed_only",
        "micro-batches that may move to a peer; failed_only: those of dead workers",
        choices=("failed_only", "any"),
    )
    memory_extra: int | None = setting(
        2, "extra micro-batches in flight; 1F1B alone has `stages - s` at stage s; null: no limit", at_least=0
    )
    profile_steps: int = setting(
        3, "number of steps at the start in which F, I, W and O are measured for the planner", at_least=0
    )
    rebalance: str = setting(
        "never",
        "move decoder layers between stages while the job trains; auto: if that gains more time than it costs; always: "
        "whenever the planned step is shorter",
        choices=("auto", "always", "never"),
        live=True,
    )
    outage: float = setting(
        900.0,
        "rebalance=auto: expected seconds until a dead worker is back, used if no earlier outage lasted longer",
        above=0,
    )


@dataclass(frozen=True)
class Muon:
    momentum: float = setting(0.95, "decay of the mean of gradients, with Nesterov's look-ahead", at_least=0, below=1)
    iterations: int = setting(5, "Newton-Schulz iterations that orthogonalise an update", at_least=1, at_most=20)
    scale: str = setting(
        "adamw",
        "factor of the update of R rows and C columns; adamw: 0.2 sqrt(max(R, C)), so that lr can be that of AdamW; "
        "original: sqrt(max(1, R / C))",
        choices=("adamw", "original"),
    )


@dataclass(frozen=True)
class Optimizer:
    name: str = fixed(
        "adamw",
        "muon: Muon for the matrices inside layers, AdamW for all other parameters; custom: optimizer.build",
        choices=("adamw", "muon", "custom"),
    )
    build: str | None = fixed(None, "custom: MODULE:NAME of a class or function that returns update rules")
    muon: Muon = field(default_factory=Muon)
    lr: float = setting(
        3e-3, "peak learning rate, after the warm-up; large models (model=gpt124m, llama1b) set a smaller one", above=0
    )
    schedule: str = setting(
        "cosine",
        "course of lr after the warm-up; cosine and linear fall to min_lr, wsd falls to it in the last steps",
        choices=("cosine", "linear", "constant", "wsd"),
    )
    min_lr: float | None = setting(None, "lr at the end of cosine, linear and wsd; null: a tenth of lr", at_least=0)
    decay: float = setting(
        0.2, "wsd: final share of the steps, in which lr falls linearly to min_lr", above=0, at_most=1
    )
    warmup: int = setting(10, "steps of linear warm-up", at_least=0)
    groups: list[str] | None = setting(
        None,
        "factors of lr and weight_decay for parameters whose name matches",
        pattern=r"[^:\s]+(:([0-9]+([.][0-9]*)?|[.][0-9]+)(e-?[0-9]+)?){1,2}",
        form="PATTERN:LR or PATTERN:LR:DECAY, factors of at least 0, for instance embedding.*:0.1:0",
    )
    beta1: float = setting(0.9, "decay of the mean of gradients", at_least=0, below=1)
    beta2: float = setting(0.95, "decay of the mean of squared gradients", at_least=0, below=1)
    eps: float = setting(1e-8, "added to the root of the mean of squared gradients", above=0)
    weight_decay: float = setting(0.1, "weight decay of matrices; vectors have none", at_least=0)
    clip: float | None = setting(1.0, "largest global gradient norm; null: no clipping", above=0)
    moments: str = fixed(
        "fp32",
        "state vectors of AdamW and Muon between two steps; bf16: half the memory, still computed in float32",
        choices=("fp32", "bf16"),
    )
    most_skipped: int = setting(
        5, "stop the job after this many consecutive updates skipped for NaN or infinity", at_least=1, live=True
    )
    stagger: bool = setting(False, "update each stage before the commit, and keep a copy for a rollback")


@dataclass(frozen=True)
class Numerics:
    precision: str = fixed(
        "fp32",
        "bf16: weights and activations are bf16, with float32 masters; bf16-autocast: only matrix products are bf16",
        choices=("fp32", "bf16", "bf16-autocast"),
    )
    reproducible: bool = fixed(False, "fixed-point gradient sums: bit-identical results whichever workers die")
    sums: str = fixed(
        "int64",
        "integer type of the fixed-point sums; int32: half the memory, needs reproducible",
        choices=("int64", "int32"),
    )


@dataclass(frozen=True)
class Checkpoint:
    every: int = setting(0, "steps between checkpoints; 0: by checkpoint.minutes only", at_least=0, live=True)
    minutes: float = setting(
        10.0,
        "minutes between checkpoints; 0: never. One is always written at the end of a run and after a signal",
        at_least=0,
        live=True,
    )
    keep: int = setting(2, "number of newest checkpoints to keep, in run.dir and in the store", at_least=1)
    keep_best: bool = setting(False, "also keep the checkpoint with the lowest validation loss")
    store: str | None = setting(
        None,
        "also upload each checkpoint to an object store or a folder, from which a run can then be resumed",
        pattern=r"((s3|gs|az)://[^/]+|file://|)(/.*)?",
        form="s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX, or an absolute path",
    )
    hf_at_end: bool = setting(False, "also export the last checkpoint to run.dir/hf/step-... in Hugging Face format")


@dataclass(frozen=True)
class Islands:
    """Several jobs, far apart, that train one model and exchange updates through a store (docs/islands.md)."""

    store: str | None = fixed(
        None,
        "the object store or folder through which islands exchange updates; null: this job trains alone",
        pattern=r"((s3|gs|az)://[^/]+|file://|)(/.*)?",
        form="s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX, or an absolute path",
    )
    name: str | None = fixed(
        None,
        "name of this island, different from those of all others",
        pattern=r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}",
        form="up to 40 letters, digits, - and _",
    )
    steps: int = fixed(
        100, "steps between two rounds, H; with islands.fragments, between two rounds of the same layer", at_least=1
    )
    fragments: int = fixed(
        1, "parts of the layers, F: a round every H/F steps, with one part each; spreads the traffic", at_least=1
    )
    delay: int = fixed(
        1, "steps between the end of a round's work and the use of its result, for the transfer", at_least=1
    )
    mix: float = fixed(
        0.0,
        "share of an island's own weights after a round; the rest is theta, the common weights",
        at_least=0,
        at_most=1,
    )
    lr: float = fixed(0.7, "learning rate of the outer step, SGD on theta", above=0)
    momentum: float = fixed(0.9, "Nesterov momentum of the outer step", at_least=0, below=1)
    bits: int = fixed(8, "bits of a value in the store: 8, with error feedback, or 32", at_least=8, at_most=32)
    patience: float = setting(
        600.0, "seconds after which a round is closed without the islands that are late", at_least=0
    )
    max_local: int | None = setting(
        None,
        "steps that an island makes after the beginning of a round before it waits for the result; null: twice "
        "islands.steps",
        at_least=1,
    )
    snapshot_every: int = fixed(
        10, "rounds between two snapshots of theta in the store, for islands that join", at_least=1
    )
    keep: int = setting(20, "number of newest rounds kept in the store; checksums: ten times as many", at_least=1)
    parts: int = fixed(
        8, "parts into which the training data are cut, one for each island; the maximum number of islands", at_least=1
    )
    part: int | None = setting(
        None,
        "set automatically at the start: the part of the data that this island reads",
        at_least=0,
        change=Change.START,
    )
    egress_per_gb: float = setting(0.0, "price of 10^9 bytes sent to the store, in dollars", at_least=0)

    @property
    def every(self) -> int:
        """Steps between two rounds."""
        return self.steps // self.fragments

    @property
    def most_local(self) -> int:
        """The value of `max_local`, with its default."""
        return 2 * self.steps if self.max_local is None else self.max_local

    @property
    def cut(self) -> tuple[int, int]:
        """(part of the data that this job reads, number of parts); (0, 1) without islands."""
        return (0, 1) if self.store is None else (self.part or 0, self.parts)


@dataclass(frozen=True)
class Run:
    steps: int = setting(60, "optimizer steps of the whole run, including resumes", at_least=1)
    epochs: float | None = setting(
        None, "passes over the training data; sets run.steps, rounded up; null: run.steps applies", above=0
    )
    dir: str = setting(
        "runs/${now:%Y-%m-%d_%H-%M-%S}",
        "folder for all files of the run",
        pattern=".+",
        form="the path of a folder",
        change=Change.START,
    )
    resume: bool | str = setting(
        False,
        "true: resume the newest checkpoint in run.dir; auto: resume if there is one",
        choices=YES_NO_AUTO,
        change=Change.START,
    )
    standby: str = setting(
        "auto",
        "start the next process of each worker in advance; auto: if 400 MB per worker are free",
        choices=("auto", "on", "off"),
    )
    respawns: int = setting(3, "maximum number of restarts of a worker that died on its own", at_least=0, live=True)
    seed: int = fixed(0, "seed of the initial weights, sample order and dropout", at_least=0)
    device: str = setting("auto", "auto: GPUs if the node has any", choices=("auto", "cpu", "cuda"))
    validate_every: int = setting(20, "steps between validations; 0: never", at_least=0)
    validate_samples: int | str = setting(
        32,
        "held-out samples per validation, always the same; rounded up to whole micro-batches; all: every whole "
        "micro-batch of them",
        choices=("all",),
        form="a whole number of at least 1",
        at_least=1,
    )
    validate_microbatches: int | None = setting(
        None,
        "held-out micro-batches per pipeline, instead of validate_samples; the total depends on D",
        at_least=1,
    )
    peak_tflops: float | None = setting(
        None,
        "peak of a worker's device in 10^12 operations per second, for MFU; null: from a table of GPUs",
        above=0,
    )
    on_event: str | None = setting(None, "shell command run for every event, with the event as JSON on standard input")
    evaluate: str | None = setting(
        None,
        "shell command for the model of the newest checkpoint, while training continues; $1 is its Hugging Face folder",
    )
    sample_log: bool = setting(False, "write samples.jsonl: the sample ids of each step")
    compile_cache: str | None = setting(
        None,
        "shared folder from which workers read compiled kernels before they compile, and to which they write new ones",
        pattern=".+",
        form="the path of a folder",
    )


@dataclass(frozen=True)
class State:
    log: str = setting("device", "where a worker keeps sent tensors until the step commits", choices=("device", "host"))
    understudy: str = setting(
        "never",
        "a worker of another stage follows the state of a stage with one live worker, and takes over if that one dies",
        choices=("auto", "never"),
    )


@dataclass(frozen=True)
class Log:
    """Exporters of metrics and events. Each needs an extra of the package and runs in its own process."""

    tensorboard: bool = setting(False, "write run.dir/tensorboard")
    wandb: bool = setting(False, "Weights & Biases; offline without an API key")
    prometheus: int | None = setting(None, "port on the coordinator's node; null: off", at_least=1, at_most=65535)


@dataclass(frozen=True)
class Control:
    coordinator: str = setting(
        "embedded",
        "how supervisors elect the coordinator; embedded: they vote",
        choices=("embedded", "etcd"),
    )
    endpoints: list[str] | None = setting(
        None,
        "addresses of the etcd servers, with coordinator=etcd",
        pattern=r"(https?://)?[^:/\s]+:[0-9]{1,5}/?",
        form="HOST:PORT or http(s)://HOST:PORT",
    )
    address: str | None = setting(
        None,
        "HOST:PORT of the first coordinator; null: a single node, which needs no address",
        change=Change.START,
        per_node=True,
    )
    interface: str | None = setting(
        None,
        "network interface or address for data; null: the one that reaches the coordinator",
        per_node=True,
    )
    heartbeat: float = setting(0.5, "seconds between heartbeats", above=0)
    suspicion: float = setting(
        10.0, "seconds without progress or heartbeats after which a worker counts as hung", above=0
    )
    mismatch: str = setting(
        "stop",
        "what to do if copies of a unit of sharded state differ; third: kill the worker with the wrong copy",
        choices=("stop", "third"),
    )
    health: float = setting(
        10.0, "seconds between a supervisor's readings of its GPU and its host; 0: never", at_least=0
    )
    lease: float = setting(
        600.0, "seconds allowed for a worker's start, its first ops and the run's last checkpoint", above=0
    )


@dataclass(frozen=True)
class Emulate:
    """`emulate=sleep` replaces computation by sleeping. Messages keep their sizes."""

    mode: str | None = fixed(None, "null: real compute", choices=(None, "sleep"))
    F: float = setting(0.02, "seconds of a forward", at_least=0)
    I: float = setting(0.02, "seconds of a backward for the input", at_least=0)
    W: float = setting(0.02, "seconds of a backward for the weights", at_least=0)
    O: float = setting(0.06, "seconds of an optimizer step", at_least=0)


@dataclass(frozen=True)
class Settings:
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    parallel: Parallel = field(default_factory=Parallel)
    schedule: Schedule = field(default_factory=Schedule)
    optimizer: Optimizer = field(default_factory=Optimizer)
    numerics: Numerics = field(default_factory=Numerics)
    state: State = field(default_factory=State)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    islands: Islands = field(default_factory=Islands)
    run: Run = field(default_factory=Run)
    log: Log = field(default_factory=Log)
    control: Control = field(default_factory=Control)
    emulate: Emulate = field(default_factory=Emulate)
    fail_at: list[str] = setting(
        list,
        "kill worker W(D,S) with SIGKILL in that step, at that moment",
        form="STEP:D.S[@MOMENT]",
        change=Change.START,
    )
    hang_at: list[str] = setting(
        list, "suspend worker W(D,S) with SIGSTOP", form="STEP:D.S[@MOMENT]", change=Change.START
    )
    slow_at: list[str] = setting(
        list, "multiply the duration of the worker's ops by FACTOR", form="STEP:D.S@FACTOR", change=Change.START
    )
    rejoin_at: list[str] = setting(
        list, "restart a worker that fail_at or hang_at stopped", form="STEP:D.S", change=Change.START
    )

    @property
    def validation_microbatches(self) -> int:
        """Number of micro-batches in a validation, unless there is less held-out data."""
        if self.run.validate_microbatches is not None:
            return self.run.validate_microbatches * self.parallel.pipelines
        wanted = self.run.validate_samples
        return -(-wanted // self.parallel.microbatch_size) if isinstance(wanted, int) else sys.maxsize

    def with_values(self, values: Mapping[str, Any]) -> Settings:
        """A copy of the settings with these new values. Does not check types or ranges.

        values: key -> new value, for instance {"model.split": [2, 2], "fail_at": []}
        """
        return _replaced(self, values)


def _replaced(of: Any, values: Mapping[str, Any]) -> Any:
    """A copy of a dataclass of groups with these new values, see `Settings.with_values`."""
    groups: dict[str, dict[str, Any]] = {}
    changed: dict[str, Any] = {}
    for key, value in values.items():
        group, dot, name = key.partition(".")
        if dot:
            groups.setdefault(group, {})[name] = value
        else:
            changed[key] = value
    return replace(of, **changed, **{group: _replaced(getattr(of, group), keys) for group, keys in groups.items()})


FAULTS = ("fail_at", "hang_at", "slow_at", "rejoin_at")
