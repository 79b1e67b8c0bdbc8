"""The records of earlier coordinators of a run, for the coordinator that replaces them.

history = History.read(run)                     # blocks: some tenths of a second for 100,000 steps
history.deaths, history.stalls, history.cpu_steps, history.step
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field

from recycle_pp.wire.files import UnreadableFile
from recycle_pp.wire.records import Profile
from recycle_pp.wire.terms import without_undone

from .events.checkpoints import CheckpointSaved
from .events.deaths import DeathDetected
from .events.job import Started
from .events.recovery import Resumed
from .events.workers import Rejoined, Respawned, Spawned
from .run_folder import RunFolder
from .run_reader import RunReader


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
    profile: Profile | None = None

    @classmethod
    def read(cls, folder: RunFolder) -> History:
        """Skips what is damaged: the job continues with the rest."""
        run = RunReader(folder)
        lines = run.follow()
        events = lines.events.new()
        # One step at a time: a call for all of them would hold the lock of Python, and the event loop would wait.
        each = ((line.step, line.loss, line.cpu_seconds) for line in lines.steps.each())
        steps = without_undone(each, lambda line: line[0])
        newest, loss, _ = steps[-1] if steps else (-1, None, None)
        starts = [number for number, event in enumerate(events) if isinstance(event, Started)]
        since = events[starts[-1] :] if starts else events
        recoveries = [event for event in since if isinstance(event, Resumed)]
        life = {e.worker: e for e in events if isinstance(e, Spawned | Respawned | Rejoined | DeathDetected)}
        profile = None
        with suppress(UnreadableFile):  # the new coordinator then plans without measured durations
            profile = run.profile()
        return cls(
            deaths=sum(isinstance(event, DeathDetected) for event in since),
            stalls=[event.stall_seconds for event in recoveries],
            lost_ops=sum(event.lost_ops for event in recoveries),
            dead=frozenset(worker for worker, event in life.items() if isinstance(event, DeathDetected)),
            step=newest,
            loss=loss,
            cpu_steps=[seconds for _, _, seconds in steps if seconds is not None],
            seconds=time.time() - since[0].time if since else 0.0,
            checkpoint=max((event.checkpoint for event in events if isinstance(event, CheckpointSaved)), default=0),
            profile=profile,
        )
