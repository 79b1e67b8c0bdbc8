"""Types for the content of the files in a run folder. docs/run-folder.md explains each field.

    files.decode(run.summary, files.read(run.summary), Summary)

The types contain only the fields that a command reads; a file may contain more. Numbers have bounds, so that a damaged
file cannot make a command print, sum or allocate without limit.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict

from msgspec import Meta, Struct

from .terms import EARLIER

Count = Annotated[int, Meta(ge=0, le=10**15)]
Number = Annotated[float, Meta(ge=-1e100, le=1e100)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]  # a duration, or a time in seconds since 1970
Term = Annotated[int, Meta(ge=-1, le=2**31)]  # term of the coordinator that wrote the line (see `terms`)
WorkerName = Annotated[str, Meta(pattern=r"^[0-9]{1,5}\.[0-9]{1,5}$")]  # "1.2"


class Step(Struct, frozen=True, kw_only=True):
    """A line of metrics.jsonl. Fields that the line lacks are None: earlier versions wrote fewer fields."""

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
    """summary.json."""

    steps: Count
    samples: Count
    tokens: Count
    deaths: Count
    bubbles: Number | None
    lost_ops: Count
    redone_ops: Count
    wall_seconds: Seconds
    final_loss: Number | None
    weights_sha256: str | None


class Links(TypedDict, total=False):
    """The value of `links` in profile.json. measured: (host, other host, seconds one way, bytes per second)."""

    hosts: dict[WorkerName, str]
    measured: list[tuple[str, str, Seconds, Number]]


class _Profile(TypedDict):
    durations_seconds: dict[Literal["F", "I", "W", "B", "O"], list[Seconds]]
    steps: Count
    turn_seconds: Seconds
    message_seconds: Seconds
    boundary_bytes: list[Count | None]
    sum_seconds: list[Seconds]
    first_forward_seconds: dict[WorkerName, Seconds]


class Profile(_Profile, total=False):
    """profile.json."""

    overhead_seconds: Seconds
    links: Links
    layout: list[Count]


class _About(TypedDict):
    step: Count


class About(_About, total=False):
    """about.json of a checkpoint. files: name -> (bytes, CRC-32). Further keys hold the settings."""

    files: dict[str, tuple[Count, Count]]
