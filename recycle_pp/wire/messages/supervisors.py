"""Between a rank's supervisor and the coordinator, and from the supervisor to its worker.

Supervisors import no numpy, and recycle_schedules does: so a worker W(d, s) is two plain numbers here.
"""

from __future__ import annotations

import msgspec

from recycle_pp.config.settings import Settings

from .activity import Activity
from .agreement import Leader, Place
from .table import COORDINATOR, SUPERVISOR, WORKER, Message, Vocabulary, sent


class Death(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a worker ended.

    cause     signal | exception | out_of_memory | gpu | exit | eviction | hang | node_loss | mismatch | unknown
    detail    "SIGKILL", the last lines of a traceback, "exit code 3"
    at        time.monotonic() of the death on its machine, as near as known
    injected  a fault injection ended it
    where     op of a micro-batch in which an exception was raised, "" if in none
    mistake   the exception with file and line, if the model's own code raised it, else ""
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
    """rank: that of the hello, or the one that a newcomer takes."""

    settings: Settings
    run_dir: str
    leader: Leader
    rank: int


@sent(COORDINATOR, SUPERVISOR)
class Redirect(Message, frozen=True):
    """This supervisor does not coordinate: connect to `leader`; None where it is not known yet who does."""

    leader: Leader | None


@sent(COORDINATOR, SUPERVISOR)
class NoPlace(Message, frozen=True):
    """To a newcomer. reason: a sentence for the user."""

    reason: str


@sent(COORDINATOR, SUPERVISOR)
class Spawn(Message, frozen=True):
    """Start a worker; one that still lives is ended first. respawns: how often it was started after a death."""

    incarnation: int
    worker: tuple[int, int]
    respawns: int


@sent(COORDINATOR, SUPERVISOR)
class Kill(Message, frozen=True):
    """SIGKILL for this incarnation; its death is reported. stacks: where its threads stand is said first."""

    incarnation: int
    stacks: bool = False


@sent(COORDINATOR, SUPERVISOR)
class Evict(Message, frozen=True):
    """SIGTERM for the worker; the job goes on without this rank."""


@sent(COORDINATOR, SUPERVISOR)
class EndsSoon(Message, frozen=True):
    """The job ends when its step is done and saved: `Finish` follows."""


@sent(COORDINATOR, SUPERVISOR)
class Finish(Message, frozen=True):
    """Ends the supervisor. code: the job's exit code; reason: in words, where it had to stop or did not begin."""

    code: int
    reason: str = ""


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node of the job: its name, and where one of its supervisors listens."""

    name: str
    host: str
    port: int


@sent(COORDINATOR, SUPERVISOR)
class Probe(Message, frozen=True):
    """Try to connect to these nodes; `Probed` is the answer. Before a worker is started that comes back."""

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
    """The worker is dying; `Died`, with the cause, follows when the kernel has cleaned up."""

    incarnation: int
    at: float  # see Death


@sent(SUPERVISOR, COORDINATOR)
class Died(Message, frozen=True):
    """The worker is dead. asked: it was told to, by a `Kill`."""

    incarnation: int
    death: Death
    asked: bool


@sent(SUPERVISOR, COORDINATOR)
class Present(Message, frozen=True):
    """Sent after every welcome.

    place     where the supervisor listens
    spawn     the newest order to start a worker that it received
    alive     whether that worker lives
    deaths    the newest deaths of its workers
    settings  the shared settings that its node was started with (`config.shared_settings`); at the job's start only
    """

    place: Place
    spawn: Spawn | None
    alive: bool
    deaths: list[Died]
    settings: dict[str, str] | None = None


@sent(SUPERVISOR, COORDINATOR)
class Probed(Message, frozen=True):
    """unreachable: in words, the targets of the last `Probe` to which no connection could be made."""

    unreachable: list[str]


@sent(SUPERVISOR, COORDINATOR)
class Stopping(Message, frozen=True):
    signal: str  # SIGINT | SIGTERM
    again: bool = False  # it has come twice: nothing is worth waiting for


class Signs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a worker's main thread.

    number   counts its activities
    seconds  since it began this one
    quiet    since it last ran on a processor, or wanted to
    """

    incarnation: int
    number: int
    activity: Activity
    seconds: float
    quiet: float


@sent(SUPERVISOR, COORDINATOR)
class SupervisorHeartbeat(Message, frozen=True):
    """The supervisor lives. signs: of its worker; None where it has none."""

    signs: Signs | None = None


@sent(SUPERVISOR, COORDINATOR)
class Stacks(Message, frozen=True):
    """Where all threads of a stuck worker stand (faulthandler's text); "" if it could not say."""

    incarnation: int
    text: str


# ---------------------------------------------------------------------------------------- supervisor -> worker


@sent(SUPERVISOR, WORKER)
class CoordinatorAt(Message, frozen=True):
    """The coordinator's new address; it comes over the worker's standard input."""

    host: str
    port: int


TO_SUPERVISOR, FROM_SUPERVISOR = Vocabulary(COORDINATOR, SUPERVISOR), Vocabulary(SUPERVISOR, COORDINATOR)
