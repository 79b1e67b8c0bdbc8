"""heartbeat.json: the coordinator's sign of life in the run folder, for whoever asks from outside.

    beat = Heartbeat(run, term=0, address="10.0.0.1:29501")
    beat.write(live)                        # every SECONDS; atomically, blocks for a small file
    beat.end(live, code=0)                  # the job is over
    sign = Sign.read(run)                   # None where there is none
    sign.verdict()                          # "alive" | "gone" | "silent" | "over", and the proof in words

On the coordinator's own machine its process is looked for: by number, start time and boot, so that a number that is
used again proves nothing. From another machine, or another container, only the file's age tells.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from recycle_pp.wire.files import UnreadableFile, decode, read
from recycle_pp.wire.records import Count, Seconds, WorkerName

from .clocks import boot_id
from .harmless import harmless
from .run_folder import RunFolder

if TYPE_CHECKING:  # a supervisor reads this module, and has no room for numpy
    from recycle_schedules import Worker

SECONDS = 1.0  # between two signs
SILENT_SECONDS = 15.0  # without one: as long as a machine may swap, and clocks of two machines may differ


class Sign(msgspec.Struct, frozen=True):
    """What heartbeat.json holds."""

    time: Seconds  # since 1970, when it was written
    host: str  # of the coordinator
    pid: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    started: Count  # clock ticks from its machine's boot to its process's start
    boot: str  # the kernel's boot id
    namespace: str  # of process numbers: containers have their own
    term: Count  # which coordinator of the job, from 0
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

    def verdict(self) -> tuple[str, str]:
        """alive, gone (its process is not there any more), silent (no sign for long, seen from elsewhere) or over; and
        how that is known."""
        if self.over:
            return "over", f"its coordinator said so, exit code {self.code}"
        who, age = f"the coordinator, process {self.pid} on {self.host},", max(0.0, time.time() - self.time)
        if self.here:
            if _started(self.pid) == self.started:
                return "alive", f"{who} is there; its last sign is {age:.0f} s old"
            return "gone", f"{who} is not there any more; its last sign is {age:.0f} s old"
        verdict = "alive" if age < SILENT_SECONDS else "silent"
        return verdict, f"{who} gave its last sign {age:.0f} s ago"


class Heartbeat:
    def __init__(self, run: RunFolder, term: int, address: str) -> None:
        self._run, self._term, self._address = run, term, address
        self._started = _started(os.getpid()) or 0

    @harmless
    def write(self, live: Iterable[Worker], over: bool = False, code: int | None = None) -> None:
        sign = Sign(
            time=time.time(),
            host=socket.gethostname(),
            pid=os.getpid(),
            started=self._started,
            boot=boot_id(),
            namespace=_namespace(),
            term=self._term,
            address=self._address,
            live=[str(worker) for worker in sorted(live)],
            over=over,
            code=code,
        )
        self._run.write_json(self._run.heartbeat, msgspec.to_builtins(sign), indent=None)

    def end(self, live: Iterable[Worker], code: int) -> None:
        self.write(live, over=True, code=code)


def address_of(run: RunFolder) -> str:
    """HOST:PORT of the coordinator of the job that runs in this folder; ValueError where none does."""
    sign = Sign.read(run)
    verdict, proof = sign.verdict() if sign else ("silent", "there is no heartbeat.json")
    if sign is None or verdict != "alive":
        raise ValueError(f"no job runs in {run.path}: {proof}")
    return sign.address


def refuse_running(run: RunFolder) -> None:
    """ValueError if a job in that folder gives signs of life. A job writes its sign once a second, so a damaged one is
    not a sign of life."""
    sign = None
    with suppress(UnreadableFile):
        sign = Sign.read(run)
    if sign is not None and (verdict := sign.verdict())[0] == "alive":
        raise ValueError(f"run.dir={run.path} belongs to a job that still runs: {verdict[1]}")


def _started(pid: int) -> int | None:
    """Clock ticks from boot to the process's start; None where there is no such process, or only its remains."""
    with suppress(OSError, ValueError, IndexError):
        about = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if about[0] in "ZX" else int(about[19])
    return None


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
