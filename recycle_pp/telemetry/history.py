"""The records of earlier coordinators of a run, which the recorder of the next coordinator continues.

history = History.read(run)                     # blocks: some tenths of a second for 100,000 events
history.deaths, history.stalls, history.cpu_steps, history.step
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from recycle_pp.wire.records import Step
from recycle_pp.wire.terms import without_undone

from .events.deaths import DeathDetected
from .events.event import Event
from .events.job import Started
from .events.recovery import Resumed
from .events.workers import Rejoined, Respawned, Spawned
from .run_folder import RunFolder
from .run_reader import RunReader, kept_events, kept_steps
from .unwritten import Unwritten

# Bytes to read at the end of metrics.jsonl, about 30,000 steps. A take-over has no time to read the steps of months.
STEP_BYTES = 16 << 20

Measures = tuple[int, float | None, float | None, float | None]
"""Step, loss, CPU seconds and time of a line of metrics.jsonl"""


@dataclass(frozen=True)
class History:
    """Figures of the run so far.

    deaths, stalls (seconds), lost_ops: since the run was started or resumed
    dead:       workers whose last event is their death
    step, loss, committed_at: of the last line of metrics.jsonl; -1 and None without one
    cpu_steps:  `cpu_seconds` of each step; in a long run, only of the newest steps
    seconds:    since the run was started or resumed
    """

    deaths: int = 0
    stalls: list[float] = field(default_factory=list)
    lost_ops: int = 0
    dead: frozenset[str] = frozenset()
    step: int = -1
    loss: float | None = None
    committed_at: float | None = None
    cpu_steps: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @classmethod
    def read(cls, folder: RunFolder) -> History:
        """The history in the folder and in this process's copies of lines that the disk may lack. Skips damaged
        lines."""
        lines = RunReader(folder).follow()
        events = lines.events.new()
        lines.steps.skip_to_last(STEP_BYTES)
        # One step at a time, because one call for all steps would hold the interpreter's lock and block the event loop.
        each = (_measures(line) for line in lines.steps.each())
        return cls.of(events, without_undone(each, lambda line: line[0]), folder.kept)

    @classmethod
    def of(cls, events: list[Event], steps: list[Measures], kept: Unwritten) -> History:
        """The history in these records. kept: lines that the disk may lack."""
        written = {event.time for event in events}
        newest = steps[-1][0] if steps else -1
        events = events + [event for event in kept_events(kept) if event.time not in written]
        steps = steps + [_measures(step) for step in kept_steps(kept) if step.step > newest]
        newest, loss, _, at = steps[-1] if steps else (-1, None, None, None)
        starts = [number for number, event in enumerate(events) if isinstance(event, Started)]
        since = events[starts[-1] :] if starts else events
        recoveries = [event for event in since if isinstance(event, Resumed)]
        life = {e.worker: e for e in events if isinstance(e, Spawned | Respawned | Rejoined | DeathDetected)}
        return cls(
            deaths=sum(isinstance(event, DeathDetected) for event in since),
            stalls=[event.stall_seconds for event in recoveries],
            lost_ops=sum(event.lost_ops for event in recoveries),
            dead=frozenset(worker for worker, event in life.items() if isinstance(event, DeathDetected)),
            step=newest,
            loss=loss,
            committed_at=at,
            cpu_steps=[seconds for _, _, seconds, _ in steps if seconds is not None],
            seconds=time.time() - since[0].time if since else 0.0,
        )


def _measures(line: Step) -> Measures:
    return line.step, line.loss, line.cpu_seconds, line.time
