"""heartbeat.json: the coordinator's sign of life in the run folder, for readers outside of the job.

    beat = Heartbeat(run, term=lambda: 0, address="10.0.0.1:29501")
    beat.write(live)                        # every SECONDS; atomically, blocks for a small file
    beat.end(live, code=0)                  # the job is over
    pulse = Pulse(run)
    pulse.look()                            # Life("alive" | "gone" | "silent" | "over", proof in words, sign)

On the coordinator's own machine its process is looked up by number, start time and boot, so a number that is used again
proves nothing. From another machine or container the file must change while it is watched. The clocks of two machines
can differ by hours, so the time in the file is not compared with a clock.
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

if TYPE_CHECKING:  # a supervisor reads this module, and has no room for numpy
    from recycle_schedules import Worker

SECONDS = 1.0  # between two signs
SILENT_SECONDS = 15.0  # without a change of the file: as long as a machine may swap
_POLL = 0.1  # seconds between two readings of a file that is watched


class Sign(msgspec.Struct, frozen=True):
    """What heartbeat.json holds."""

    time: Seconds  # since 1970, when it was written
    host: str  # of the coordinator
    pid: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    started: Count  # clock ticks from its machine's boot to its process's start
    boot: str  # the kernel's boot id
    namespace: str  # of process numbers: containers have their own
    term: Term  # the coordinator's, which is newer than that of each coordinator before it
    address: str  # HOST:PORT where it listens
    live: list[WorkerName]  # workers that take part
    over: bool  # the job has ended
    code: int | None  # its exit code, once it is over

    @classmethod
    def read(cls, run: RunFolder) -> Sign | None:
        """None if there is none; UnreadableFile if it is damaged."""
        try:
            return decode(run.heartbeat, read(run.heartbeat), cls)
        except FileNotFoundError:
            return None

    @property
    def here(self) -> bool:
        """Can this process see the coordinator's, if it lives?"""
        return self.boot == boot_id() and self.namespace == _namespace()


class Life(NamedTuple):
    """verdict: alive, gone (its process has ended), silent (no sign for long, seen from another machine) or over."""

    verdict: str
    proof: str
    sign: Sign | None
    age: float  # seconds since the sign was written, as far as this process knows


class Pulse:
    """Judges whether a job lives, and remembers what it has seen: later looks need not wait."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._sign: Sign | None = None  # the newest
        self._since, self._changed = 0.0, False  # time.monotonic() at which it was there first; was another one before?
        self._looked = -math.inf

    def look(self) -> Life:
        """The first look waits for the next sign if the coordinator is on another machine: 1 s if the job lives,
        `SILENT_SECONDS` if not. UnreadableFile if the file is damaged."""
        if time.monotonic() > self._looked + SILENT_SECONDS:
            self._sign = None  # a change since then may be old
        while True:
            sign, now = Sign.read(self._run), time.monotonic()
            self._looked = now
            if sign != self._sign:
                self._changed = self._sign is not None
                self._sign, self._since = sign, now
            if sign is None:
                return Life("silent", "there is no heartbeat.json", None, 0.0)
            if sign.over:
                age = max(0.0, time.time() - sign.time)
                return Life("over", f"its coordinator said so, exit code {sign.code}", sign, age)
            who = f"the coordinator, process {sign.pid} on {sign.host},"
            if sign.here:
                age = max(0.0, time.time() - sign.time)
                if _started(sign.pid) == sign.started:
                    return Life("alive", f"{who} is there; its last sign is {age:.0f} s old", sign, age)
                return Life("gone", f"{who} is not there any more; its last sign is {age:.0f} s old", sign, age)
            age = now - self._since
            if age > SILENT_SECONDS:
                return Life("silent", f"{who} has given no sign for {age:.0f} s", sign, age)
            if self._changed:
                return Life("alive", f"{who} gave a sign {age:.0f} s ago", sign, age)
            time.sleep(_POLL)


class Heartbeat:
    def __init__(self, run: RunFolder, term: Callable[[], int], address: str) -> None:
        self._run, self._term, self._address = run, term, address
        self._started = _started(os.getpid()) or 0

    @guarded
    def write(self, live: Iterable[Worker], over: bool = False, code: int | None = None) -> None:
        """Leaves the sign of a newer coordinator as it is."""
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
        )
        self._run.write_json(self._run.heartbeat, msgspec.to_builtins(sign), indent=None)

    def end(self, live: Iterable[Worker], code: int) -> None:
        self.write(live, over=True, code=code)


def address_of(run: RunFolder) -> str:
    """HOST:PORT of the coordinator of the job that runs in this folder; ValueError if none does. Waits like `Pulse`."""
    life = Pulse(run).look()
    if life.sign is None or life.verdict != "alive":
        raise ValueError(f"no job runs in {run.path}: {life.proof}")
    return life.sign.address


def refuse_running(run: RunFolder) -> None:
    """ValueError if a job in that folder gives signs of life; waits like `Pulse`. A job writes its sign once a second,
    so a damaged one is not a sign of life."""
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


def _namespace() -> str:
    try:
        return pid_namespace()
    except OSError:
        return ""
