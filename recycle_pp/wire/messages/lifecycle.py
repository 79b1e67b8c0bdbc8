"""Messages about the life of a worker: it joins the job, sends heartbeats, sends or receives state, and leaves."""

from __future__ import annotations

import msgspec
from recycle_schedules import Worker

from recycle_pp.config.faults import Fault
from recycle_pp.config.settings import Settings

from .members import Member
from .table import COORDINATOR, WORKER, Message, sent
from .units import UnitRuns

Address = tuple[str, int]
"""host, port"""


@sent(COORDINATOR, WORKER)
class WorkerWelcome(Message, frozen=True):
    """The coordinator accepts the worker.

    resume  number of completed steps in the checkpoint to load; 0: none, as for joiners
    faults  injected faults that have not fired yet
    """

    settings: Settings
    worker: Worker
    run_dir: str
    resume: int
    faults: list[Fault]


@sent(WORKER, COORDINATOR, lasting=True)
class Ready(Message, frozen=True):
    """The worker has built its stage.

    address         address at which the worker receives a donor's state
    platform        see `execution.device`
    boundary_bytes  size of its stage's output for a micro-batch
    deferred_share  share of its parameters whose gradients op `W` computes
    machine         name of its machine, the same for all workers that use the same cores
    cores           number of cores of the machine
    units           the units of its stage's layers: layer -> (name, number of elements) of each of its units. A member
                    that gets layers which are missing here sends the message again, with all that it has or had
    memory          the fields of a `StageMemory` for each way in which the stage may run, if they were measured
    notes           sentences about its device for the user; the coordinator prints each sentence once
    data            fingerprint of its training data; "" if it is irrelevant
    depth, stays    the layers of the model that can move to other stages, see `StageModule`
    origin          digest of model.path, from which its frozen parameters were read; "" if it has none
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


@sent(WORKER, COORDINATOR, lasting=True)
class CannotRun(Message, frozen=True):
    """The settings cannot be fulfilled. reason: a sentence for the user."""

    reason: str


@sent(WORKER, COORDINATOR)
class WorkerHeartbeat(Message, frozen=True):
    """Sent regularly by a thread of the worker.

    now        time of sending, in seconds of the worker's monotonic clock
    boot       boot id of the worker's machine; machines with the same id share a clock (`timing.clocks`)
    delivered  serial number of the main thread's activity (`supervisors.Signs`) if it is a wait that could end now,
               else None
    reading    the pending read of training data that started first; None if this worker reads no file
    lacks      members whose messages the sum that it waits for lacks, if that is known
    """

    now: float
    boot: str
    delivered: int | None = None
    reading: Reading | None = None
    lacks: list[Member] = msgspec.field(default_factory=list)


class Reading(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A read of training data. path: the file. seconds: time since the read started; 0: no read is in progress."""

    path: str
    seconds: float


class Cache(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A folder of compiled kernels: its number of files, and their bytes."""

    folder: str
    files: int
    bytes: int


@sent(WORKER, COORDINATOR)
class FirstOps(Message, frozen=True):
    """What the first ops of this worker process took, for records only. Sent when the worker is ready, and again with
    `seconds` after its first step.

    backend  of its links: tcp, gloo, nccl
    device   the worker's device
    gpus     number of GPUs of its machine
    caches   the caches of compiled kernels at its start, by name
    kernels  seconds of compilation at its start, by kernel
    seconds  of its first ops: forward, backward, reduction
    """

    backend: str
    device: str
    gpus: int
    caches: dict[str, Cache]
    kernels: dict[str, float]
    seconds: dict[str, float] = msgspec.field(default_factory=dict)


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
    """A session begins in which this worker follows units of these layers. All that has arrived in an older session is
    dropped. The donors may connect before this message arrives.

    layers   for a joiner: all layers of its stage. For a member: the layers that its stage will gain; none if the move
             has been given up. For an understudy: all layers of the stage of `worker`
    worker   the worker whose understudy this member becomes; else None
    elements number of elements of an understudy's units
    """

    session: int
    layers: list[int]
    worker: Worker | None = None
    elements: int = 0


@sent(COORDINATOR, WORKER)
class Donate(Message, frozen=True):
    """Send the state of these units, and later updates, to a member that receives it at `address`.

    to       the member that receives the state
    worker   the worker that it will play
    session  serial number of this attempt to catch up; messages of older sessions are void
    units    the units to send
    of       number of units that `to` receives in this session, from all donors together
    early    whether to send each step's gradient before the vote, once all units are sent: `to` is an understudy
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
    """A joiner, or a member whose stage will gain layers, has received its units, in their state after `step`. session:
    the session in which its donors sent them."""

    step: int
    session: int


@sent(WORKER, COORDINATOR, of_generation=True)
class Prepared(Message, frozen=True):
    """An understudy can complete the commit of `step`: it has the state after the previous step, and the gradient with
    which its donor votes in this generation. session: see `Synced`"""

    generation: int
    step: int
    session: int


@sent(WORKER, COORDINATOR)
class NoRoom(Message, frozen=True):
    """The member cannot be an understudy: it needs and has these bytes of memory. session: see `Synced`"""

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
