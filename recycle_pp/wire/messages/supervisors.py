"""Messages between a rank's supervisor and the coordinator, and from the supervisor to its worker.

Supervisors do not import recycle_schedules, which imports numpy. So a worker W(d, s) is two plain numbers here.
"""

from __future__ import annotations

import msgspec

from recycle_pp.config.settings import Settings

from .activity import Activity
from .agreement import Leader, Place
from .table import COORDINATOR, SUPERVISOR, WORKER, Message, Vocabulary, sent


class Death(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The death of a worker.

    cause     signal | exception | out_of_memory | gpu | exit | eviction | hang | node_loss | mismatch | unknown
    detail    "SIGKILL", the last lines of a traceback, "exit code 3"
    at        time.monotonic() of the death on its machine, as exactly as known
    injected  whether a fault injection caused it
    where     op of the micro-batch in which an exception was raised, or ""
    mistake   the exception with file and line, if the model's own code raised it, or ""
    """

    cause: str
    detail: str
    at: float | None = None
    injected: bool = False
    where: str = ""
    mistake: str = ""


# ----------------------------------------------------------------------------------- coordinator -> supervisor


@sent(COORDINATOR, SUPERVISOR)
class SupervisorWelcome(Message, frozen=True):
    """rank: that of the hello, or the rank assigned to a new node."""

    settings: Settings
    run_dir: str
    leader: Leader
    rank: int


@sent(COORDINATOR, SUPERVISOR)
class Redirect(Message, frozen=True):
    """This supervisor does not coordinate: connect to `leader`, or retry if it is None (not known yet)."""

    leader: Leader | None


@sent(COORDINATOR, SUPERVISOR)
class NoPlace(Message, frozen=True):
    """Rejects a new node. reason: a sentence for the user."""

    reason: str


@sent(COORDINATOR, SUPERVISOR)
class Spawn(Message, frozen=True):
    """Start a worker, after killing a live one. respawns: number of starts after a death."""

    incarnation: int
    worker: tuple[int, int]
    respawns: int


@sent(COORDINATOR, SUPERVISOR)
class Kill(Message, frozen=True):
    """Kill this incarnation with SIGKILL and report its death. stacks: send `Stacks` first."""

    incarnation: int
    stacks: bool = False


@sent(COORDINATOR, SUPERVISOR)
class Evict(Message, frozen=True):
    """Send SIGTERM to the worker. The job continues without this rank."""


@sent(COORDINATOR, SUPERVISOR)
class EndsSoon(Message, frozen=True):
    """The job ends after saving the current step. `Finish` follows."""


@sent(COORDINATOR, SUPERVISOR)
class Finish(Message, frozen=True):
    """Exit. code: the job's exit code; reason: in words, if the job stopped early or did not start."""

    code: int
    reason: str = ""


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node of the job: its name, and the address of one of its supervisors."""

    name: str
    host: str
    port: int


@sent(COORDINATOR, SUPERVISOR)
class Probe(Message, frozen=True):
    """Try to connect to these nodes and answer with `Probed`. Sent before a worker is restarted."""

    targets: list[Target]


@sent(COORDINATOR, SUPERVISOR)
class CoordinatorHeartbeat(Message, frozen=True):
    pass


# ----------------------------------------------------------------------------------- supervisor -> coordinator


@sent(SUPERVISOR, COORDINATOR)
class Spawned(Message, frozen=True):
    incarnation: int
    pid: int


@sent(SUPERVISOR, COORDINATOR)
class Dying(Message, frozen=True):
    """The worker is dying. `Died`, with the cause, follows when the kernel has cleaned up."""

    incarnation: int
    at: float  # see Death


@sent(SUPERVISOR, COORDINATOR)
class Died(Message, frozen=True):
    """The worker is dead. asked: killed by a `Kill`."""

    incarnation: int
    death: Death
    asked: bool


@sent(SUPERVISOR, COORDINATOR)
class Registration(Message, frozen=True):
    """Sent after every welcome.

    place     address of the supervisor
    spawn     newest order to start a worker
    alive     whether that worker is alive
    deaths    newest deaths of its workers
    settings  shared settings with which its node was started (`config.node_settings`); only at the start of the job
    """

    place: Place
    spawn: Spawn | None
    alive: bool
    deaths: list[Died]
    settings: dict[str, str] | None = None


@sent(SUPERVISOR, COORDINATOR)
class Probed(Message, frozen=True):
    """unreachable: description of the targets of the last `Probe` that could not be reached."""

    unreachable: list[str]


@sent(SUPERVISOR, COORDINATOR)
class Stopping(Message, frozen=True):
    signal: str  # SIGINT | SIGTERM
    again: bool = False  # second signal: stop without waiting


class Signs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Vital signs of a worker's main thread.

    number   counts its activities
    seconds  since the start of this activity
    quiet    seconds since it last ran on a processor or was ready to
    """

    incarnation: int
    number: int
    activity: Activity
    seconds: float
    quiet: float


@sent(SUPERVISOR, COORDINATOR)
class SupervisorHeartbeat(Message, frozen=True):
    """The supervisor is alive. signs: of its worker; None without a worker."""

    signs: Signs | None = None


@sent(SUPERVISOR, COORDINATOR)
class Stacks(Message, frozen=True):
    """Stack traces of all threads of a hung worker (faulthandler's text); "" if they could not be obtained."""

    incarnation: int
    text: str


# ---------------------------------------------------------------------------------------- supervisor -> worker


@sent(SUPERVISOR, WORKER)
class CoordinatorAt(Message, frozen=True):
    """The coordinator's new address, sent over the worker's standard input."""

    host: str
    port: int


TO_SUPERVISOR, FROM_SUPERVISOR = Vocabulary(COORDINATOR, SUPERVISOR), Vocabulary(SUPERVISOR, COORDINATOR)
