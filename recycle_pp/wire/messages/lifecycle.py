"""A worker joins the job, shows that it lives, sends or receives state, and leaves."""

from __future__ import annotations

import msgspec
from recycle_schedules import Worker

from recycle_pp.config.faults import Fault
from recycle_pp.config.settings import Settings

from .table import COORDINATOR, WORKER, Message, sent

Address = tuple[str, int]
"""host, port"""


@sent(COORDINATOR, WORKER)
class WorkerWelcome(Message, frozen=True):
    """resume: completed steps in the checkpoint to load; 0: none. faults: injected faults that have not fired yet."""

    settings: Settings
    worker: Worker
    run_dir: str
    resume: int
    faults: list[Fault]


@sent(WORKER, COORDINATOR, lasting=True)
class Ready(Message, frozen=True):
    """The worker has built its stage.

    address         where it receives a donor's state
    platform        see `execution.device`
    boundary_bytes  output of its stage for a micro-batch
    deferred_share  share of its parameters whose gradients come with W
    machine         name shared by all workers that use the same cores
    cores           of that machine
    units           names of the units of its stage
    memory          the fields of a `StageMemory` for each way in which the stage may run, if they were measured
    notes           sentences about its device for the user; the coordinator prints each sentence once
    data            fingerprint of its training data; "" if it is irrelevant
    """

    address: Address
    platform: str
    boundary_bytes: int = 0
    deferred_share: float = 0.0
    machine: str = ""
    cores: int = 0
    units: list[str] = msgspec.field(default_factory=list)
    memory: list[dict[str, float]] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)
    data: str = ""


@sent(WORKER, COORDINATOR, lasting=True)
class CannotRun(Message, frozen=True):
    """The settings cannot be fulfilled. reason: a sentence for the user."""

    reason: str


@sent(WORKER, COORDINATOR)
class WorkerHeartbeat(Message, frozen=True):
    """Sent regularly by a thread of the worker.

    now        the worker's monotonic clock, in seconds
    boot       identity of that clock (`timing.clocks`)
    delivered  number of the main thread's activity (`supervisors.Signs`), if it is a wait that could end now
    reading    the longest pending read of training data; None if this worker reads no file
    """

    now: float
    boot: str
    delivered: int | None = None
    reading: Reading | None = None


class Reading(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """path: of the file; seconds: since the read started; 0: no read in progress."""

    path: str
    seconds: float


@sent(WORKER, COORDINATOR)
class StoreValue(Message, frozen=True):
    """Sets a key of the workers' shared store (`comm.store`)."""

    key: str
    value: bytes


@sent(COORDINATOR, WORKER)
class StoreValues(Message, frozen=True):
    """Values that workers have set in the store (`comm.store`)."""

    values: list[tuple[str, bytes]]


@sent(COORDINATOR, WORKER)
class Donate(Message, frozen=True):
    """Send the state of these units, and later updates, to a worker that receives it at `address`.

    session  larger than that of any earlier attempt; messages of older sessions are void
    units    empty: all units of the stage
    of       number of units that the worker receives in this session, from all donors
    """

    to: Worker
    session: int
    address: Address | None = None
    units: list[int] = msgspec.field(default_factory=list)
    of: int = 0


@sent(WORKER, COORDINATOR)
class Synced(Message, frozen=True):
    """The worker has its units in the state after a step. session: that of its donors."""

    step: int
    session: int


@sent(WORKER, COORDINATOR, lasting=True)
class Leaving(Message, frozen=True):
    """The worker's machine is about to be reclaimed. It leaves at the next commit, if its stage keeps a peer."""


@sent(COORDINATOR, WORKER)
class Leave(Message, frozen=True):
    """The job continues without this worker."""


@sent(COORDINATOR, WORKER)
class Exit(Message, frozen=True):
    """The job is over."""
