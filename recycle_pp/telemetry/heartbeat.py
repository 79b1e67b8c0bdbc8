"""heartbeat.json: the coordinator's heartbeat in the run folder, for readers outside the job.

    beat = Heartbeat(run, term=lambda: 0, address="10.0.0.1:29501")
    beat.write(live)                        # call it every SECONDS; atomic; blocks while it writes
    beat.end(live, code=0)                  # the job is over
    pulse = Pulse(run)
    pulse.look()                            # Life("alive" | "gone" | "silent" | "over", proof in words, sign)

A reader on the coordinator's machine looks for the coordinator's process, identified by its id, start time and boot. A
reader on another machine or in another container, or to whom /proc does not show the process, watches whether the file
changes. It does not compare the time in the file with a clock, because the clocks of two machines can differ by hours.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

from recycle_pp.linux.processes import boot_id, pid_namespace, process_stat
from recycle_pp.wire.files import UnreadableFile, decode, read
from recycle_pp.wire.records import Count, Seconds, Term, WorkerName

from .guard import guarded
from .run_folder import RunFolder

if TYPE_CHECKING:  # supervisors import this module, and not numpy
    from recycle_schedules import Worker

SECONDS = 1.0  # seconds between two writes
SILENT_SECONDS = 15.0  # the job counts as silent after this time without a change; swapping can cause shorter pauses
STORED_SILENT_SECONDS = 60.0  # the same for a run in a store: between two signs are 10 s and the upload of all files
_POLL = 0.1  # seconds between two reads of a watched file


class Sign(msgspec.Struct, frozen=True):
    """The content of heartbeat.json."""

    time: Seconds  # when the sign was written, Unix time
    host: str  # host of the coordinator
    pid: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    started: Count  # clock ticks from the boot of the host to the start of the process
    boot: str  # the kernel's boot id
    namespace: str  # namespace of process ids; each container has its own
    term: Term  # term of the coordinator; higher than the terms of earlier coordinators
    address: str  # HOST:PORT where the coordinator listens
    live: list[WorkerName]  # workers that take part in the step
    over: bool  # whether the job has ended
    code: int | None  # exit code of a job that has ended
    patience: Seconds = 0.0  # seconds without a newer sign after which no supervisor on another node will take over
    job_id: str = ""  # identifies the job: a later job may listen at the same address

    @classmethod
    def read(cls, run: RunFolder) -> Sign | None:
        """The newest sign; None if there is no file. Raises UnreadableFile if the file is damaged."""
        try:
            return decode(run.heartbeat, read(run.heartbeat), cls)
        except FileNotFoundError:
            return None

    @property
    def here(self) -> bool:
        """Whether this process shares a machine and a process namespace with the coordinator, and may see it."""
        return self.boot == boot_id() and self.namespace == _namespace() and not _hidden(self.pid)


class Life(NamedTuple):
    """Whether a job runs.

    verdict: alive, gone (the process has ended), silent (no file, or no change seen from another machine) or over
    proof:   the reason for the verdict, in words
    """

    verdict: str
    proof: str
    sign: Sign | None
    age: float  # seconds since the sign was written or first seen


class Pulse:
    """Finds out whether the job of a run folder is running. Remembers the last sign, so `look` waits only in the first
    call, or if the last call was more than `SILENT_SECONDS` ago."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._sign: Sign | None = None  # the newest sign that was read
        self._since, self._changed = 0.0, False  # when `_sign` was first read, monotonic; whether it replaced another
        self._looked = -math.inf

    def look(self) -> Life:
        """Whether the job is running now. If the coordinator is on another machine, the first call waits for the next
        sign: 1 s if the job is running, else `SILENT_SECONDS`. Raises UnreadableFile if the file is damaged.

        If the coordinator is lost and another node may still take over, waits `Sign.patience` for that node's sign. For
        a run in a store, waits `STORED_SILENT_SECONDS`."""
        if time.monotonic() > self._looked + SILENT_SECONDS:
            self._sign = None  # forgotten, because a change since an old sign does not prove that the job still runs
        while True:
            sign = Sign.read(self._run)
            now = time.monotonic()
            self._looked = now
            if sign != self._sign:
                self._changed = self._sign is not None
                self._sign = sign
                self._since = now
            if sign is None:
                return Life("silent", "there is no heartbeat.json", None, 0.0)
            if sign.over:
                age = max(0.0, time.time() - sign.time)
                return Life("over", f"the coordinator ended with exit code {sign.code}", sign, age)
            coordinator = f"the coordinator, process {sign.pid} on {sign.host},"
            age, ended = now - self._since, False
            limit = _limit(self._run, sign)
            if sign.here:
                ended = _started(sign.pid) != sign.started
                age = max(age if ended else 0.0, time.time() - sign.time)
                if ended and (age > limit or not sign.patience):
                    return Life("gone", f"{coordinator} has ended; last heartbeat {age:.0f} s ago", sign, age)
            elif age > limit:
                return Life("silent", f"{coordinator} has sent no heartbeat for {age:.0f} s", sign, age)
            if ended and self._changed:
                return Life("alive", f"{coordinator} has ended, and another node may take over", sign, age)
            if self._changed or (sign.here and not ended):
                return Life("alive", f"{coordinator} runs; last heartbeat {age:.0f} s ago", sign, age)
            time.sleep(_POLL)

    def ended(self) -> bool:
        """Whether the job is over or sends no heartbeat. Waits like `look`. False without a heartbeat.json.

        The loss of the coordinator alone does not end the job, because a new one continues it within seconds.
        """
        with suppress(UnreadableFile):
            life = self.look()
            return life.verdict == "over" or (life.verdict != "alive" and life.age > SILENT_SECONDS)
        return False


class Heartbeat:
    def __init__(self, run: RunFolder, term: Callable[[], int], address: str, job_id: str = "") -> None:
        self._run = run
        self._term = term
        self._address = address
        self._job_id = job_id
        self._started = _started(os.getpid()) or 0

    @guarded
    def write(self, live: Iterable[Worker], patience: float = 0.0, over: bool = False, code: int | None = None) -> None:
        """Writes the file, unless a newer coordinator has written it. patience: see `Sign`"""
        term = self._term()
        with suppress(UnreadableFile):
            if (last := Sign.read(self._run)) is not None and last.term > term:
                return
        sign = Sign(
            time=time.time(),
            host=socket.gethostname(),
            pid=os.getpid(),
            started=self._started,
            boot=boot_id(),
            namespace=_namespace(),
            term=term,
            address=self._address,
            live=[str(worker) for worker in sorted(live)],
            over=over,
            code=code,
            patience=patience,
            job_id=self._job_id,
        )
        self._run.write_json(self._run.heartbeat, msgspec.to_builtins(sign), indent=None)

    def end(self, live: Iterable[Worker], code: int) -> None:
        self.write(live, over=True, code=code)


def address_of(run: RunFolder) -> str:
    """HOST:PORT of this run's coordinator. Raises ValueError if no job runs. Waits like `Pulse.look`."""
    life = Pulse(run).look()
    if life.sign is None or life.verdict != "alive":
        raise ValueError(f"no job runs in {run.path}: {life.proof}")
    return life.sign.address


def longest_look(run: RunFolder) -> float:
    """The longest time that `Pulse.look` waits, in seconds."""
    with suppress(UnreadableFile):
        return _limit(run, Sign.read(run))
    return 0.0


def _limit(run: RunFolder, sign: Sign | None) -> float:
    """The seconds after which a job with this newest sign counts as ended."""
    silent = STORED_SILENT_SECONDS if run.is_copy else SILENT_SECONDS
    return silent if sign is None else max(silent, sign.patience)


def refuse_running(run: RunFolder) -> None:
    """Raises ValueError if a job runs in this folder. Waits like `Pulse.look`. A damaged file does not count as a
    heartbeat, because a running job replaces it every second."""
    with suppress(UnreadableFile):
        life = Pulse(run).look()
        if life.verdict == "alive":
            raise ValueError(f"run.dir={run.path} belongs to a job that still runs: {life.proof}")


def _started(pid: int) -> int | None:
    """Clock ticks from the boot to the start of a process; None if it has ended."""
    with suppress(OSError):
        stat = process_stat(pid)
        return None if stat is None or stat.ended else stat.started
    return None


def _hidden(pid: int) -> bool:
    """Whether the process exists, but /proc does not show it to this user (its mount option hidepid)."""
    with suppress(OSError):
        if process_stat(pid) is not None:
            return False
    try:
        os.kill(pid, 0)  # sends nothing
    except PermissionError:
        return True
    except (OSError, OverflowError):
        pass
    return False


def _namespace() -> str:
    try:
        return pid_namespace()
    except OSError:
        return ""
