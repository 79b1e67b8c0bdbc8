"""Messages between a rank's supervisor and the coordinator, and from the supervisor to its worker.

Supervisors do not import recycle_schedules, which imports numpy. So these messages represent a worker W(d, s) by two
plain numbers.
"""

from __future__ import annotations

import msgspec

from recycle_pp.config.settings import Settings

from . import health  # noqa: F401  # adds its messages to the table
from .activity import Activity
from .agreement import Leader, Place
from .machines import Judgement
from .table import COORDINATOR, SUPERVISOR, WORKER, Message, Vocabulary, sent


class Death(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The death of a worker.

    cause     signal | exception | out_of_memory | gpu | exit | eviction | hang | node_loss | mismatch | quarantine |
              unknown
    detail    for instance "SIGKILL", "exit code 3" or the last lines of a traceback
    at        best known time of the death: time.monotonic() on the worker's machine
    injected  whether an injected fault caused the death
    where     the op and the micro-batch in which an exception was raised, or ""
    mistake   the exception with file and line if the model's own code raised it, else ""
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
    """The coordinator accepts the supervisor.

    rank    the rank in the supervisor's hello, or the rank that a new node gets
    job_id  identifies the job: the same in all its welcomes, different from that of an earlier job at the same address
    places  for a new node: rank -> address, for all other supervisors, because one of them may be the next coordinator
    quarantined  UUID -> detail of the GPUs in quarantine, because the node may not share the run folder
    """

    settings: Settings
    run_dir: str
    leader: Leader
    rank: int
    job_id: str = ""
    places: dict[int, Place] = msgspec.field(default_factory=dict)
    quarantined: dict[str, str] = msgspec.field(default_factory=dict)


@sent(COORDINATOR, SUPERVISOR)
class Redirect(Message, frozen=True):
    """This supervisor does not coordinate. Connect to `leader`, or retry later if it is None, because the leader is not
    known yet."""

    leader: Leader | None


@sent(COORDINATOR, SUPERVISOR)
class NoPlace(Message, frozen=True):
    """Rejects a new node.

    reason   a sentence for the user
    surplus  whether other processes of the same launcher have taken all free ranks
    """

    reason: str
    surplus: bool = False


@sent(COORDINATOR, SUPERVISOR)
class Spawn(Message, frozen=True):
    """Start a worker. If an earlier one is still alive, kill it first. respawns: number of restarts after deaths."""

    incarnation: int
    worker: tuple[int, int]
    respawns: int


@sent(COORDINATOR, SUPERVISOR)
class Kill(Message, frozen=True):
    """Kill this incarnation of the worker with SIGKILL and report its death. stacks: whether to send `Stacks` first."""

    incarnation: int
    stacks: bool = False


@sent(COORDINATOR, SUPERVISOR)
class ShowStacks(Message, frozen=True):
    """Send the `Stacks` of this incarnation of the worker, which continues."""

    incarnation: int


@sent(COORDINATOR, SUPERVISOR)
class Evict(Message, frozen=True):
    """Send SIGTERM to the worker. The job continues without this rank."""


@sent(COORDINATOR, SUPERVISOR)
class EndsSoon(Message, frozen=True):
    """The job is about to save the current step and end. `Finish` follows."""


@sent(COORDINATOR, SUPERVISOR)
class Finish(Message, frozen=True):
    """Exit. code: the job's exit code; reason: a sentence if the job stopped early or did not start, else ""."""

    code: int
    reason: str = ""


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node of the job: its name, and the address of one of its supervisors."""

    name: str
    host: str
    port: int


@sent(COORDINATOR, SUPERVISOR)
class Probe(Message, frozen=True):
    """Try to connect to these nodes and answer with `Probed`. The coordinator sends it before it restarts a worker."""

    targets: list[Target]


class Line(msgspec.Struct, frozen=True, array_like=True, order=True, forbid_unknown_fields=True):
    """A line that belongs to a .jsonl file of the run folder, but has not been written to the disk.

    number  serial number among the lines of its coordinator
    file    name of the file
    step    the step that the line is about
    record  its JSON, without the writer's term; b"" if the lines of `step` and later steps are to be removed
    """

    number: int
    file: str
    step: int
    record: bytes


@sent(COORDINATOR, SUPERVISOR)
class KeepLines(Message, frozen=True):
    """Keep these lines in memory for the next coordinator, because they could not be written to the disk.

    whole    whether to drop all lines of earlier messages
    first    lowest number to keep: lines of earlier messages with lower numbers are dropped
    dropped  number of older lines, by file, that are neither on the disk nor kept
    """

    lines: list[Line]
    whole: bool
    first: int
    dropped: dict[str, int]


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
    """The worker is dying. `Died`, with the cause, follows when the kernel has ended the process."""

    incarnation: int
    at: float  # see Death


@sent(SUPERVISOR, COORDINATOR)
class Died(Message, frozen=True):
    """The worker is dead. asked: whether a `Kill` caused the death."""

    incarnation: int
    death: Death
    asked: bool


@sent(SUPERVISOR, COORDINATOR)
class Registration(Message, frozen=True):
    """Sent after every welcome.

    place     address of the supervisor
    spawn     newest order to start a worker that the supervisor has received
    alive     whether the worker of that order is alive
    deaths    newest deaths of the supervisor's workers
    settings  shared settings that the supervisor's node was started with (`config.node_settings`); only at the start of
              the job, else None
    clock     time.time() when this message was sent; None if `settings` is None
    """

    place: Place
    spawn: Spawn | None
    alive: bool
    deaths: list[Died]
    settings: dict[str, str] | None = None
    clock: float | None = None


@sent(SUPERVISOR, COORDINATOR)
class MachineChecked(Message, frozen=True):
    """The result of the quick check of a machine (`machine_checks.quick`), sent by the machine's first supervisor.

    versions  installed versions of Python and of packages, by name
    wrong     the checks that found a problem
    """

    versions: dict[str, str]
    wrong: list[Judgement]


@sent(SUPERVISOR, COORDINATOR)
class Probed(Message, frozen=True):
    """The answer to a `Probe`. unreachable: descriptions of the targets that could not be reached."""

    unreachable: list[str]


@sent(SUPERVISOR, COORDINATOR)
class Stopping(Message, frozen=True):
    """The supervisor has received a signal to end."""

    signal: str  # SIGINT | SIGTERM
    again: bool = False  # whether this is the second signal; if so, the job ends without waiting for a checkpoint


class Signs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Vital signs of a worker's main thread.

    number     serial number of its current activity
    activity   its current activity
    seconds    seconds since the start of this activity
    quiet      seconds since the thread last ran on a processor or was ready to run
    delayed    seconds of this activity in which the thread was ready to run but had no core
    suspended  whether the process is suspended, for example by SIGSTOP
    """

    incarnation: int
    number: int
    activity: Activity
    seconds: float
    quiet: float
    delayed: float = 0.0
    suspended: bool = False


@sent(SUPERVISOR, COORDINATOR)
class SupervisorHeartbeat(Message, frozen=True):
    """The supervisor is alive. signs: vital signs of its worker; None if it has no worker."""

    signs: Signs | None = None


@sent(SUPERVISOR, COORDINATOR)
class Stacks(Message, frozen=True):
    """Stack traces of all threads of a worker (faulthandler's text); "" if they could not be obtained.

    shown  whether this answers `ShowStacks`; else the worker hung and was killed
    """

    incarnation: int
    text: str
    shown: bool = False


# ---------------------------------------------------------------------------------------- supervisor -> worker


@sent(SUPERVISOR, WORKER)
class CoordinatorAt(Message, frozen=True):
    """The coordinator's new address. Sent through the worker's standard input."""

    host: str
    port: int


TO_SUPERVISOR, FROM_SUPERVISOR = Vocabulary(COORDINATOR, SUPERVISOR), Vocabulary(SUPERVISOR, COORDINATOR)
