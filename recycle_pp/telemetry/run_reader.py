"""Reads the folder of a run during or after the job, on any machine that has the folder.

    run = RunReader("runs/mine")
    run.steps(), run.events()           # everything so far; raises UnreadableFile if a file is damaged
    lines = run.follow()
    lines.steps.new(), lines.events.new()       # since the last call
    run.summary(), run.profile(), run.trace(20)
    run.hang_now(), run.hangs(20), run.first_ops(), run.contacts(), run.last_line("1.2")       # for `evidence`

All commands and `History` read runs with this class. It accepts folders of earlier versions. It skips lines that a
crash has cut short, and lines that a replaced coordinator wrote (`wire.terms`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
from recycle_schedules import Plan, Trace, load

from recycle_pp.wire.files import UnreadableFile, decode, open_regular, read
from recycle_pp.wire.records import Contact, FirstOps, HangReport, HealthRecord, Profile, Step, Summary
from recycle_pp.wire.terms import EARLIER, without_undone

from .events.catalog import parse
from .events.deaths import explained
from .events.event import Event
from .follower import Follower, term_of
from .run_folder import RunFolder
from .unwritten import Unwritten

Record = TypeVar("Record")
_steps = msgspec.json.Decoder(Step)
_TAIL = 4096  # bytes at the end of a log in which to find its last line


class Following(NamedTuple):
    """Readers of metrics.jsonl and events.jsonl. A step that is rolled back and repeated may be returned twice."""

    steps: Follower[Step]
    events: Follower[Event]

    @property
    def damage(self) -> list[UnreadableFile]:
        """The first damage of each file that has any."""
        return [follower.damage for follower in self if follower.damage is not None]


class RunReader:
    """Reads the files of a run.

    folder: the `RunFolder`, with the paths of the files and the reader of config.yaml"""

    def __init__(self, run: RunFolder | str | Path) -> None:
        self.folder = run if isinstance(run, RunFolder) else RunFolder(run)

    def follow(self) -> Following:
        """Readers of the existing lines, and then of new ones."""
        return Following(Follower(self.folder.metrics, 0, _step), Follower(self.folder.events, 0, _event))

    def steps(self) -> list[Step]:
        """The committed steps, each once. Raises UnreadableFile if metrics.jsonl is damaged."""
        return without_undone(self.follow().steps.whole(), lambda line: line.step)

    def events(self) -> list[Event]:
        """The events, with the final cause of each death. Raises UnreadableFile if events.jsonl is damaged."""
        return explained(self.follow().events.whole())

    def summary(self) -> Summary | None:
        """The content of summary.json; None before the end of the run. Raises UnreadableFile if it is damaged."""
        return _read(self.folder.summary, Summary)

    def profile(self) -> Profile | None:
        """The content of profile.json; None before the profile is complete. Raises UnreadableFile if it is damaged."""
        return _read(self.folder.profile, Profile)

    def health(self) -> HealthRecord | None:
        """The content of health.json; None before the hardware was first read. Raises UnreadableFile if it is
        damaged."""
        return _read(self.folder.health, HealthRecord)

    def hang_now(self) -> HangReport | None:
        """The newest report about a step that takes unusually long. Raises UnreadableFile if it is damaged."""
        return _read(self.folder.hangs / "now.json", HangReport)

    def hangs(self, step: int) -> list[HangReport]:
        """The reports of the hangs in this step. Raises UnreadableFile if they are damaged."""
        return _read(self.folder.hangs / f"step-{step:06d}.json", list[HangReport]) or []

    def stuck_at(self, name: str) -> str:
        """The innermost line of the main thread in a file of stack traces in `hangs`; "" if there is none."""
        with suppress(FileNotFoundError):
            text = read(self.folder.hangs / name).decode(errors="replace")
            *_, main = re.split(r"^(?:Current thread|Thread) .*$", text, flags=re.MULTILINE)  # the main thread is last
            return next((line.strip() for line in main.splitlines() if line.lstrip().startswith("File ")), "")
        return ""

    def first_ops(self) -> list[FirstOps]:
        """The newest receipt of each worker process, oldest process first."""
        receipts = Follower(self.folder.first_ops, 0, _first_ops).new()
        return [line for n, line in enumerate(receipts) if line.seconds or _is_last(receipts[n:])]

    def contacts(self) -> list[Contact]:
        """The receipts of supervisors about lost coordinators, sorted by time. The clocks of hosts may differ."""
        paths = sorted(self.folder.receipts.glob(self.folder.contact("*").name))
        lines = [line for path in paths for line in Follower(path, 0, _contact).new()]
        return sorted(lines, key=lambda line: line.time)

    def last_line(self, worker: str) -> str:
        """The last line of a worker's log; "" without one."""
        with suppress(FileNotFoundError, UnreadableFile), open_regular(self.folder.log(worker)) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            lines = file.read().decode(errors="replace").rstrip().splitlines()
            return lines[-1] if lines else ""
        return ""

    def traced(self) -> list[int]:
        """The steps that have a trace: those around a death or a rejoin."""
        found = (path.stem.removeprefix("step-") for path in self.folder.traces.glob("step-*.json"))
        return sorted(int(step) for step in found if step.isdecimal())

    def trace(self, step: int) -> Plan:
        """The trace of a step. Raises ValueError if the step has no trace, UnreadableFile if the file is damaged."""
        traced = self.traced()
        if step not in traced:
            known = f"there are {', '.join(map(str, traced))}" if traced else "there are none yet"
            raise ValueError(f"{self.folder.path} has no trace of step {step}; {known}")
        path = self.folder.trace(step)
        with open_regular(path):  # raises if this is not a regular file, because reading a pipe would never end
            pass
        try:
            return load(path)
        except UnicodeDecodeError:
            raise UnreadableFile(path, "it is not text") from None
        except (ValueError, TypeError, AttributeError, KeyError, IndexError, OverflowError, RecursionError) as e:
            raise UnreadableFile(path, f"it is not a trace ({str(e).removeprefix(f'{path}: ')})") from None

    def last_recovery(self) -> int:
        """The last traced step with a recovery, or else the last traced step. Raises ValueError if the run has no
        traces."""
        traced = self.traced()
        if not traced:
            raise ValueError(f"{self.folder.path} has no traces; only steps around a death or a rejoin have one")
        hit = (s for s in reversed(traced) if (t := self.trace(s)) and isinstance(t, Trace) and t.phases)
        return next(hit, traced[-1])


def kept_steps(kept: Unwritten) -> list[Step]:
    """The steps in the copies that a supervisor keeps."""
    return [_steps.decode(line.record) for line in kept.lines("metrics.jsonl") if line.record]


def kept_events(kept: Unwritten) -> list[Event]:
    """The events in the copies that a supervisor keeps."""
    return [_event(line.record)[0] for line in kept.lines("events.jsonl")]


def _step(line: bytes) -> tuple[Step, int]:
    step = _steps.decode(line)
    return step, step.term


def _event(line: bytes) -> tuple[Event, int]:
    data = msgspec.json.decode(line)
    return parse(data), term_of(data)


def _first_ops(line: bytes) -> tuple[FirstOps, int]:
    record = msgspec.json.decode(line, type=FirstOps)
    return record, record.term


def _contact(line: bytes) -> tuple[Contact, int]:
    return msgspec.json.decode(line, type=Contact), EARLIER


def _is_last(receipts: Sequence[FirstOps]) -> bool:
    """Whether the first of these receipts is the last one of its worker."""
    return all(later.worker != receipts[0].worker for later in receipts[1:])


def _read(path: Path, of: type[Record]) -> Record | None:
    try:
        return decode(path, read(path), of)
    except FileNotFoundError:
        return None
