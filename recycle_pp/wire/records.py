"""Types for the content of the files in a run folder. docs/run-folder.md explains each field.

    files.decode(run.summary, files.read(run.summary), Summary)

The types contain only the fields that a command reads; a file may contain more. Numbers have bounds, so that a damaged
file cannot make a command print, sum or allocate without limit.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta, Struct

from .terms import EARLIER

Count = Annotated[int, Meta(ge=0, le=10**15)]
Number = Annotated[float, Meta(ge=-1e100, le=1e100)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]  # a duration, or a time in seconds since 1970
Term = Annotated[int, Meta(ge=-1, le=2**31)]  # term of the coordinator that wrote the line (see `terms`)
WorkerName = Annotated[str, Meta(pattern=r"^[0-9]{1,5}\.[0-9]{1,5}$")]  # "1.2"


class Step(Struct, frozen=True, kw_only=True):
    """A line of metrics.jsonl. A field is None if the line lacks it, because earlier versions wrote fewer fields."""

    step: Count
    time: Seconds | None = None
    generation: int | None = None
    term: Term = EARLIER
    loss: Number | None = None
    val_loss: Number | None = None
    val_samples: Count | None = None
    step_seconds: Seconds | None = None
    tokens_per_second: Number | None = None
    tokens_per_second_per_worker: Number | None = None
    tflops: Number | None = None
    mfu: Number | None = None
    peak_bytes: Count | None = None
    reserved_bytes: Count | None = None
    forward_seconds: Seconds | None = None
    backward_seconds: Seconds | None = None
    weight_seconds: Seconds | None = None
    optimizer_seconds: Seconds | None = None
    reduce_seconds: Seconds | None = None
    wait_seconds: Seconds | None = None
    live_workers: Count | None = None
    cpu_seconds: Number | None = None


class Samples(Struct, frozen=True, kw_only=True):
    """A line of samples.jsonl."""

    step: Count
    samples: list[Count] | None = None
    term: Term = EARLIER


class ProtocolLine(Struct, frozen=True, kw_only=True):
    """A line of protocol.jsonl: either an event and the fingerprint of its outcome, or a snapshot of the job
    (base64)."""

    time: Seconds
    term: Term
    event: dict[str, Any] | None = None
    outcome: str = ""
    snapshot: str | None = None


class Summary(TypedDict, total=False):
    """The content of summary.json."""

    steps: Count
    samples: Count
    tokens: Count
    deaths: Count
    stall_seconds: list[Seconds]
    bubbles: Number | None
    lost_ops: Count
    redone_ops: Count
    wall_seconds: Seconds
    cpu_seconds_per_step: Seconds
    final_loss: Number | None
    weights_sha256: str | None


class Links(TypedDict, total=False):
    """The value of `links` in profile.json. measured: (host, other host, seconds one way, bytes per second)."""

    hosts: dict[WorkerName, str]
    measured: list[tuple[str, str, Seconds, Number]]


class OutageRecord(TypedDict):
    """The value of `outages` in profile.json. time: when the file was written."""

    time: Seconds
    observed_seconds: Seconds
    count: Count
    past_seconds: list[Seconds]
    away_seconds: dict[WorkerName, Seconds]


class FirstSteps(TypedDict):
    """The speed of a worker in its first steps: a value of `first_steps` in profile.json.

    machine        name of the worker's machine
    cores          number of cores of that machine
    usual_seconds  kind of op -> usual time of such an op
    own            the ops' own time in a step, as a multiple of `usual_seconds`; median of the steps
    waits          the ops' elapsed time in a step, as a multiple of their own time; median of the steps
    """

    machine: str
    cores: Count
    usual_seconds: dict[str, Seconds]
    own: Number
    waits: Number


class Profile(TypedDict):
    """The content of profile.json."""

    durations_seconds: dict[Literal["F", "I", "W", "B", "O"], list[Seconds]]
    steps: Count
    turn_seconds: Seconds
    message_seconds: Seconds
    boundary_bytes: list[Count | None]
    sum_seconds: list[Seconds]
    overhead_seconds: NotRequired[Seconds]
    links: NotRequired[Links]
    layout: NotRequired[list[Count]]
    outages: NotRequired[OutageRecord]
    first_steps: NotRequired[dict[WorkerName, FirstSteps]]


class Device(Struct, frozen=True, kw_only=True):
    """The newest values of a device in health.json. device: UUID of a GPU, or "host". None: unknown."""

    worker: WorkerName
    host: str
    device: str
    temperature: Number | None = None  # degrees Celsius
    power: Number | None = None  # watts
    clock: Number | None = None  # MHz
    uncorrected: Count | None = None  # memory errors
    corrected: Count | None = None


class HealthRecord(Struct, frozen=True, kw_only=True):
    """The content of health.json."""

    time: Seconds
    devices: list[Device]


class Sign(Struct, frozen=True, kw_only=True):
    """The activity of a worker, in a report of `hangs`. Times are in seconds. `protocol.hangs.Sign` explains the
    fields."""

    does: str
    kind: str = ""  # starts, works, device, waits
    what: str = ""
    first: bool = False  # whether this is the worker's first op of its kind, which may have to be compiled
    seconds: Number = 0.0
    quiet: Number = 0.0
    delivered: Number | None = None
    silent: Number = 0.0
    unanswered: Number | None = None
    delayed: Number = 0.0
    reading: Number | None = None
    path: str = ""
    lacks: list[WorkerName] = []
    host: str | None = None


class HangReport(Struct, frozen=True, kw_only=True):
    """The content of hangs/now.json, and of each report in hangs/step-000020.json.

    missing   workers whose supervisor has never connected
    stuck     worker -> where it is stuck, for how long, and the file with its stacks
    deadlock  workers that would wait forever although none is stuck
    no_disk   all readers of training data, if none of their disks answers
    waits     (worker, the worker or "coordinator" that it waits for)
    """

    time: Seconds
    generation: int
    step: Count = 0
    missing: list[WorkerName] = []
    stuck: dict[WorkerName, dict[str, Any]] = {}
    deadlock: list[WorkerName] = []
    no_disk: list[WorkerName] = []
    workers: dict[WorkerName, Sign] = {}
    waits: list[tuple[str, str]] = []


class Cache(Struct, frozen=True, kw_only=True):
    folder: str
    files: Count
    bytes: Count


class FirstOps(Struct, frozen=True, kw_only=True):
    """A line of receipts/first-forward.jsonl (see `wire.messages.lifecycle.FirstOps`). `seconds` is empty in the line
    that was written before the worker's first step."""

    time: Seconds
    step: Count
    worker: WorkerName
    host: str | None = None
    term: Term = EARLIER
    caches: dict[str, Cache] = {}
    kernels: dict[str, Number] = {}
    seconds: dict[str, Number] = {}


class Contact(Struct, frozen=True, kw_only=True):
    """A line of receipts/supervisor-3.jsonl.

    what: lost (the supervisor lost its coordinator), follows (it follows the next one), or gave_up
    """

    time: Seconds
    rank: Count
    host: str
    pid: Count
    what: str
    detail: str


class About(TypedDict):
    """The content of a checkpoint's about.json. files: name -> (bytes, CRC-32). Further keys contain the settings."""

    step: Count
    files: NotRequired[dict[str, tuple[Count, Count]]]
