"""The records of earlier coordinators of a run, for the coordinator that replaces them.

history = History.read(run)                     # blocks: some tenths of a second for 100,000 steps
history.deaths, history.stalls, history.cpu_steps, history.step
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from recycle_pp.wire.files import UnreadableFile, decode, open_regular, read
from recycle_pp.wire.records import Profile
from recycle_pp.wire.terms import EARLIER, Terms, without_undone

from .run_folder import RunFolder

_LIFE = {
    "respawned": False,
    "spawned": False,
    "rejoined": False,
    "death_detected": True,
}  # event -> whether the worker is dead after it


class _Event(msgspec.Struct):
    """The fields that are read of a line of events.jsonl."""

    event: str
    time: float
    term: int = EARLIER
    worker: str | None = None
    stall_seconds: float = 0.0
    lost_ops: int = 0
    checkpoint: int = 0


class _Step(msgspec.Struct):
    """The fields that are read of a line of metrics.jsonl."""

    step: int
    cpu_seconds: float
    term: int = EARLIER
    loss: float | None = None


@dataclass(frozen=True)
class History:
    """
    deaths, stalls (seconds), lost_ops: since the run was started or resumed
    dead:       workers whose last event is their death
    step, loss: of the last line of metrics.jsonl; -1 and None without one
    cpu_steps:  `cpu_seconds` of each step
    seconds:    since the run was started or resumed
    checkpoint: steps that the newest saved checkpoint holds, 0 without one
    profile:    content of profile.json
    """

    deaths: int = 0
    stalls: list[float] = field(default_factory=list)
    lost_ops: int = 0
    dead: frozenset[str] = frozenset()
    step: int = -1
    loss: float | None = None
    cpu_steps: list[float] = field(default_factory=list)
    seconds: float = 0.0
    checkpoint: int = 0
    profile: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, run: RunFolder) -> History:
        events = list(_lines(run.events, _Event))
        metrics = without_undone(_lines(run.metrics, _Step), lambda line: line.step)
        starts = [number for number, event in enumerate(events) if event.event == "started"]
        since = events[starts[-1] :] if starts else events
        life = {e.worker: _LIFE[e.event] for e in events if e.event in _LIFE}
        return cls(
            deaths=sum(event.event == "death_detected" for event in since),
            stalls=[event.stall_seconds for event in since if event.event == "resumed"],
            lost_ops=sum(event.lost_ops for event in since if event.event == "resumed"),
            dead=frozenset(str(worker) for worker, is_dead in life.items() if is_dead),
            step=metrics[-1].step if metrics else -1,
            loss=metrics[-1].loss if metrics else None,
            cpu_steps=[line.cpu_seconds for line in metrics],
            seconds=time.time() - since[0].time if since else 0.0,
            checkpoint=max((event.checkpoint for event in events if event.event == "checkpoint_saved"), default=0),
            profile=_profile(run.profile),
        )


def _profile(path: Path) -> Mapping[str, Any] | None:
    """None if the file is missing or damaged: the new coordinator then plans without measured durations."""
    with suppress(FileNotFoundError, UnreadableFile):
        return decode(path, read(path), Profile)
    return None


T = TypeVar("T", _Event, _Step)


def _lines(path: Path, of: type[T]) -> Iterator[T]:
    """The valid lines of a file. They are decoded one at a time: one call for all of them would hold Python's lock, and
    the event loop would wait for it."""
    decoder, terms = msgspec.json.Decoder(of), Terms()
    with suppress(FileNotFoundError, UnreadableFile), open_regular(path) as file:
        for line in file:
            with suppress(msgspec.MsgspecError, ValueError, RecursionError):
                decoded = decoder.decode(line)
                if terms.counts(decoded.term):
                    yield decoded
