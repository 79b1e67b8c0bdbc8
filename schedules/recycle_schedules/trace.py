"""Traces: a plan's ops with measured times.

    trace = Trace(problem, OpArrays.of(problem, ops), generation=3, status=("done", "cut", ...), phases={...})
    trace.save("traces/step-000020.json")
    load("traces/step-000020.json")        # a Trace; load("plan.json") is a Plan

A Trace is a Plan, so the same code draws both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from .ops import Worker
from .plans import Json, Plan

STATUSES = ("done", "cut", "redone")
"""done: the op finished. cut: the op did not finish, because its worker died or aborted it. redone: it repeats a lost
op."""


@dataclass(frozen=True, eq=False)
class Trace(Plan):
    """A Plan with measured times.

    generation  generation of the membership at the end of the step
    status      one of STATUSES for every op
    phases      times of a recovery (detected, announced, unblocked, regrouped, planned, resumed), in `time_unit`, with
                the same origin as the ops
    died        the workers that died in this step and are dead at its end"""

    generation: int = 0
    status: tuple[str, ...] = ()
    phases: Mapping[str, float] = field(default_factory=dict)
    died: tuple[Worker, ...] = ()

    def __post_init__(self) -> None:
        if not self.status:
            object.__setattr__(self, "status", ("done",) * len(self.arrays))
        if len(self.status) != len(self.arrays) or set(self.status) - set(STATUSES):
            raise ValueError(f"status: expected one of {', '.join(STATUSES)} for every op")

    def to_json(self) -> Json:
        """The trace as JSON values, in the format of trace files."""
        out = super().to_json() | {"generation": self.generation, "phases": dict(self.phases)}
        out["died"] = [str(worker) for worker in self.died]
        for entry, status in zip(out["ops"], self.status, strict=True):
            entry["status"] = status
        return out

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The trace from the keys of a trace file. Raises ValueError if it is malformed; the message is one
        sentence."""
        plan = Plan.from_json(data)
        return cls(
            plan.problem,
            plan.arrays,
            plan.lower_bound,
            plan.time_unit,
            layout=plan.layout,
            generation=int(data.get("generation", 0)),
            status=tuple(entry.get("status", "done") for entry in data["ops"]),
            phases={str(k): float(t) for k, t in data.get("phases", {}).items()},
            died=tuple(Worker.parse(text) for text in data.get("died", [])),
        )


def load(path: str | Path) -> Plan:
    """The Trace or Plan in a JSON file. Raises ValueError if the content is neither, OSError if the file cannot be
    read."""
    try:
        data = json.loads(Path(path).read_text())
    except json.JSONDecodeError as e:
        raise ValueError(f"{path}: not JSON ({e})") from None
    return (Trace if isinstance(data, Mapping) and "generation" in data else Plan).from_json(data)
