"""What an earlier coordinator of the same run has written, as the one that takes its place needs it.

history = History.read(run)
history.deaths, history.stalls, history.cpu_steps, history.step
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from .run_folder import RunFolder

_LIFE = {"respawned": False, "spawned": False, "rejoined": False, "death_detected": True}  # event -> it is dead


@dataclass(frozen=True)
class History:
    """step: newest one with a line in metrics.jsonl, -1 without; dead: workers whose last news is their death; seconds:
    since the run began, or was resumed."""

    deaths: int
    stalls: list[float]
    lost_ops: int
    dead: frozenset[str]
    step: int
    loss: float | None
    cpu_steps: list[float]
    seconds: float

    @classmethod
    def read(cls, run: RunFolder) -> History:
        events, metrics = run.lines(run.events), run.lines(run.metrics)
        starts = [number for number, event in enumerate(events) if event["event"] == "started"]
        since = events[starts[-1] :] if starts else events
        life: dict[str, Any] = {e["worker"]: _LIFE[e["event"]] for e in events if e["event"] in _LIFE}
        return cls(
            deaths=sum(event["event"] == "death_detected" for event in since),
            stalls=[event["stall_seconds"] for event in since if event["event"] == "resumed"],
            lost_ops=sum(event["lost_ops"] for event in since if event["event"] == "resumed"),
            dead=frozenset(worker for worker, is_dead in life.items() if is_dead),
            step=metrics[-1]["step"] if metrics else -1,
            loss=metrics[-1]["loss"] if metrics else None,
            cpu_steps=[line["cpu_seconds"] for line in metrics],
            seconds=time.time() - since[0]["time"] if since else 0.0,
        )
