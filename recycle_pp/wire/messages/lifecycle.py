"""Messages about the life of a worker: it joins the job, sends heartbeats, sends or receives state, and leaves."""

from __future__ import annotations

import msgspec
from recycle_schedules import Worker

from recycle_pp.config.faults import Fault
from recycle_pp.config.settings import Settings

from .islands import OuterState
from .members import Member
from .table import COORDINATOR, WORKER, Message, sent
from .units import UnitRuns

Address = tuple[str, int]
"""host, port"""


@sent(COORDINATOR, WORKER)
class WorkerWelcome(Message, frozen=True):
    """The coordinator accepts the worker.

    resume  number of completed steps in the checkpoint to load; 0: no checkpoint, as for joiners
    faults  injected faults that have not fired yet
    joins   whether peers send all state, so the worker needs no initial values
    """

    settings: Settings
    worker: Worker
    run_dir: str
    resume: int
    faults: list[Fault]
    joins: bool = False


@sent(WORKER, COORDINATOR, lasting=True)
class Ready(Message, frozen=True):
    """The worker has built its stage.

    address         address at which the worker receives a donor's state
    platform        see `execution.device`
    boundary_bytes  size of the stage's output for a micro-batch
    deferred_share  share of the stage's parameters whose gradients op `W` computes
    machine         name of the worker's machine, the same for all workers that use the same cores
    cores           number of cores of the machine
    units           the units of the stage's layers: layer -> (name, number of elements) of each of its units. A member
                    that later gets different layers sends the message again, with all layers that it has or had
    memory          the fields of a `StageMemory` for each way in which the stage may run, if they were measured
    notes           sentences about the worker's device for the user; the coordinator prints each sentence once
    data            fingerprint of the worker's training data; "" if it is irrelevant
    depth, stays    the layers of the model that can move to other stages, see `StageModule`
    origin          digest of model.path, from which the stage's frozen parameters were read; "" if the stage has none
    outer           for an island, its position in the rounds, from the checkpoint and the store; else None
    """

    address: Address
    platform: str
    boundary_bytes: int = 0
    deferred_share: float = 0.0
    machine: str = ""
    cores: int = 0
    units: dict[int, list[tuple[str, int]]] = msgspec.field(default_factory=dict)
    memory: list[dict[str, float]] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)
    data: str = ""
    depth: int = 0
    stays: str | None = None
    origin: str = ""
    outer: OuterState | None = None


@sent(WORKER, COORDINATOR, lasting=True)
class CannotRun(Message, frozen=True):
    """The worker cannot run with these settings. reason: a sentence for the user."""

    reason: str


@sent(WORKER, COORDINATOR)
class WorkerHeartbeat(Message, frozen=True):
    """Sent regularly by a thread of the worker.

    now        time of sending, in seconds of the worker's monotonic clock
    boot       boot id of the worker's machine; machines with the same id share a clock (`timing.clocks`)
    delivered  serial number of the main thread's activity (`supervisors.Signs`) if this activity is a wait and the
               message that it waits for has arrived; else None
    reading    the pending read of training data that started first; None if this worker reads no file
    lacks      members whose messages are missing in the sum that the worker waits for, if that is known
    received   bytes that the worker has received from its peers, see `comm.links`; None: unknown
    """

    now: float
    boot: str
    delivered: int | None = None
    reading: Reading | None = None
    lacks: list[Member] = msgspec.field(default_factory=list)
    received: int | None = None


class Reading(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A read of training data. path: the file. seconds: time since the read started; 0: no read is in progress."""

    path: str
    seconds: float


class Cache(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A folder of compiled kernels, the number of its files, and their total size in bytes."""

    folder: str
    files: int
    bytes: int


@sent(WORKER, COORDINATOR)
class FirstOps(Message, frozen=True):
    """Durations at the start of a worker process, for records only. Sent when the worker is ready, and again with
    `seconds` after its first step.

    backend  back end of the worker's links: tcp, gloo, nccl
    device   the worker's device
    gpus     number of GPUs of its machine
    caches   name -> cache of compiled kernels, as found at the worker's start
    kernels  kernel -> seconds of its compilation at the worker's start
    seconds  durations of the worker's first ops: forward, backward, reduction
    """

    backend: str
    device: str
    gpus: int
    caches: dict[str, Cache]
    kernels: dict[str, float]
    seconds: dict[str, float] = msgspec.field(default_factory=dict)


@sent(COORDINATOR, WORKER)
class Profile(Message, frozen=True):
    """Write a trace of torch's profiler over the next `steps` steps into the run folder, then send `Profiled`."""

    steps: int


@sent(WORKER, COORDINATOR)
class Profiled(Message, frozen=True):
    """The answer to `Profile`. path: file of the trace. steps: number of steps in it. failed: if no trace was written,
    the reason, else ""."""

    path: str
    steps: int
    failed: str = ""


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
class Expect(Message, frozen=True):
    """Starts a session in which this worker follows units of these layers. The worker drops all state that arrived in
    an older session. The donors may connect before this message arrives.

    layers   for a joiner: all layers of its stage. For a member: the layers that its stage will gain. For an
             understudy: all layers of the stage of `worker`. [] for a member that must no longer follow any units
    worker   the worker whose understudy this member becomes; else None
    elements number of elements of an understudy's units
    """

    session: int
    layers: list[int]
    worker: Worker | None = None
    elements: int = 0


@sent(COORDINATOR, WORKER)
class Donate(Message, frozen=True):
    """Send the state of these units, and then their updates, to the member that listens at `address`.

    to       the member that receives the state
    worker   the worker for which `to` receives the state: it plays this worker, or may have to
    session  serial number of this attempt to catch up; messages of older sessions are void
    units    the units to send
    of       number of units that `to` receives in this session, from all donors together
    early    whether `to` is an understudy. If so, once all units are sent, send each step's gradient before the vote
    """

    to: Member
    worker: Worker
    session: int
    address: Address | None = None
    units: UnitRuns = msgspec.field(default_factory=list)
    of: int = 0
    early: bool = False


@sent(WORKER, COORDINATOR)
class Synced(Message, frozen=True):
    """A joiner, or a member whose stage will gain layers, has received its units, in their state after `step`.

    session: the session in which the donors sent the units
    """

    step: int
    session: int


@sent(WORKER, COORDINATOR, lasting=True)
class StreamLost(Message, frozen=True):
    """A stream of state has broken, or could not be opened. Sent by the donor and by the follower, if they notice.

    session: see `Synced`
    """

    session: int


@sent(WORKER, COORDINATOR, of_generation=True)
class Prepared(Message, frozen=True):
    """An understudy can complete the commit of `step`: it has the state after the previous step, and the gradient of
    its donor's vote in this generation. session: see `Synced`"""

    generation: int
    step: int
    session: int


@sent(WORKER, COORDINATOR)
class NoRoom(Message, frozen=True):
    """The member cannot be an understudy: it needs `needed` bytes of memory, and `free` bytes are free.

    session: see `Synced`
    """

    session: int
    needed: int
    free: int


@sent(WORKER, COORDINATOR, lasting=True)
class Leaving(Message, frozen=True):
    """The worker's machine is about to be reclaimed. The worker leaves at the next commit if its stage has another live
    worker."""


@sent(COORDINATOR, WORKER)
class Leave(Message, frozen=True):
    """The job continues without this worker."""


@sent(COORDINATOR, WORKER)
class Exit(Message, frozen=True):
    """The job is over."""
