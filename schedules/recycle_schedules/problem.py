"""What to plan: shape, who is alive, durations, memory, what is already done.

    problem = Problem(pipelines=3, stages=4, microbatches=6, failed=[(1, 2)], memory_limit={"base": "1f1b", "extra": 2})
    Problem.from_json(json.load(file)).replace(failed=[])

The keys are those of the problem files (docs/planner.md). Everything is checked here, once: a Problem that exists has a
schedule. A bad one raises ValueError with one sentence that begins with the key.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from .ops import KINDS, Done, MicroBatch, Worker
from .progress import BIT, WEIGHTS, Progress

Json = dict[str, Any]

CHOICES = {
    "backward": ("decoupled", "coupled", "mixed"),
    "optimizer": ("staggered", "barrier", "none"),
    "reroute": ("failed_only", "any"),
}
OP_SETS = {
    "decoupled": (frozenset("FIW"),),
    "coupled": (frozenset("FB"),),
    "mixed": (frozenset("FIW"), frozenset("FB")),
}
"""What one micro-batch needs at one stage, by `backward`."""


class Begun(NamedTuple):
    """A micro-batch at a stage where a live worker has done `kinds` of it: the rest runs on that worker too."""

    worker: Worker
    kinds: frozenset[str]


@dataclass(frozen=True)
class Problem:
    """The planner's input. Times are numbers in any one unit.

    pipelines      D
    stages         P; worker W(d, s) runs stage s of pipeline d
    microbatches   per pipeline: a number, or one per pipeline
    failed         the workers that are not there
    durations      {"F", "I", "W", "B", "O"}: a time, or one per stage; defaults F = I = W = 1, B = I + W, O = 0
    backward       "decoupled" (I and W) | "coupled" (B) | "mixed" (either, per micro-batch and stage)
    optimizer      "staggered" (each stage steps by itself) | "barrier" (all together) | "none"
    memory_limit   most micro-batches in flight (from the start of F to the end of W or B) on a worker: None | number |
                   one per stage | {"base": "1f1b", "extra": k} = P - s + k | {"per_worker": {"d,s": n}, "default": n}
    i_release      share in [0, 1] of a micro-batch's memory that the end of I frees
    send           latency between adjacent stages; send_rerouted: between different pipelines (default: send)
    allreduce      time from a stage's last gradient to its optimizer steps; one per stage or one for all
    reroute        "failed_only": micro-batches leave their pipeline only where its worker is dead | "any"
    speed          {"d,s": x}: that worker takes duration / x
    done [Done] | Progress, busy_until {"d,s": t}, committed [stage]
                   with any of them: the remainder of a broken step; time 0 is now
    """

    pipelines: int
    stages: int
    microbatches: int | tuple[int, ...]
    failed: Iterable[Worker] = ()
    durations: Mapping[str, Any] = field(default_factory=dict)
    backward: str = "mixed"
    optimizer: str = "staggered"
    memory_limit: Any = None
    i_release: float = 0.0
    send: float = 0.0
    send_rerouted: float | None = None
    allreduce: Any = 0.0
    reroute: str = "failed_only"
    speed: Mapping[str, float] = field(default_factory=dict)
    done: Iterable[Done] | Progress | None = None
    busy_until: Mapping[str, float] | None = None
    committed: Iterable[int] | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        from .problem_checks import check

        check(self)

    # ---- JSON

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Problem:
        """The problem of a file's keys; ValueError with one sentence if it is malformed or has no schedule."""
        if not isinstance(data, Mapping):
            raise ValueError(f"a problem is an object with keys, not {type(data).__name__}")
        known = [f.name for f in fields(cls)]
        unknown = sorted(str(key) for key in data if key not in known)
        if unknown:
            raise ValueError(f"unknown problem key {unknown[0]!r}; known are {', '.join(known)}")
        for key in ("pipelines", "stages", "microbatches"):
            if key not in data:
                raise ValueError(f"{key}: missing")
        return cls(**{key: value for key, value in data.items() if value is not None})

    def to_json(self) -> Json:
        """The keys that differ from their defaults, as plain JSON values."""
        out: Json = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Progress):
                value = tuple(value.entries(self))
            empty = value is None or (f.name in ("failed", "speed", "durations") and not value)
            if not empty and value != f.default:
                out[f.name] = _plain(value)
        return out

    def replace(self, **changes: Any) -> Problem:
        """The same problem with other values of some keys (None: back to the default)."""
        kept = {f.name: getattr(self, f.name) for f in fields(self)} | changes
        return type(self)(**{key: value for key, value in kept.items() if value is not None})

    def __hash__(self) -> int:
        return hash(repr(self))

    # ---- what the keys mean

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Micro-batches of each pipeline."""
        m = self.microbatches
        return m if isinstance(m, tuple) else (m,) * self.pipelines

    @property
    def total(self) -> int:
        """Micro-batches of all pipelines."""
        return sum(self.counts)

    @cached_property
    def first(self) -> np.ndarray:
        """Global id of the first micro-batch of each pipeline, and the total: int64, shape (D + 1,)."""
        return np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)])

    def microbatch_keys(self) -> list[MicroBatch]:
        """All micro-batches in the order of their global ids."""
        return [(d, i) for d, m in enumerate(self.counts) for i in range(m)]

    @cached_property
    def dead(self) -> frozenset[Worker]:
        return frozenset(self.failed)

    @cached_property
    def live(self) -> tuple[tuple[int, ...], ...]:
        """The live pipelines of every stage."""
        return tuple(tuple(d for d in range(self.pipelines) if (d, s) not in self.dead) for s in range(self.stages))

    def workers(self) -> list[Worker]:
        """All live workers, pipeline by pipeline."""
        every = (Worker(d, s) for d in range(self.pipelines) for s in range(self.stages))
        return [w for w in every if w not in self.dead]

    def per_stage(self, key: str) -> tuple[float, ...]:
        """A duration (F, I, W, B, O) or "allreduce", one per stage."""
        return self._per_stage[key]

    @cached_property
    def _per_stage(self) -> dict[str, tuple[float, ...]]:
        given = {"F": 1.0, "I": 1.0, "W": 1.0, "O": 0.0} | dict(self.durations) | {"allreduce": self.allreduce}
        wide = {
            k: tuple(map(float, v)) if isinstance(v, (list, tuple)) else (float(v),) * self.stages
            for k, v in given.items()
        }
        wide.setdefault("B", tuple(i + w for i, w in zip(wide["I"], wide["W"], strict=True)))
        return wide

    @cached_property
    def speeds(self) -> dict[Worker, float]:
        """The workers whose speed is given; 1 for all others."""
        return {Worker.parse(key): float(x) for key, x in self.speed.items()}

    def duration(self, kind: str, worker: Worker) -> float:
        """How long an op takes on a worker."""
        return self._per_stage[kind][worker.stage] / self.speeds.get(worker, 1.0)

    def limit(self, worker: Worker) -> float:
        """Most micro-batches in flight on a worker; math.inf if there is no limit."""
        m = self.memory_limit
        if isinstance(m, Mapping):
            if m.get("base") == "1f1b":
                return self.stages - worker.stage + m.get("extra", 0)
            key = f"{worker.pipeline},{worker.stage}"
            value = m.get("per_worker", {}).get(key, m.get("default"))
        elif isinstance(m, (list, tuple)):
            value = m[worker.stage]
        else:
            value = m
        return math.inf if value is None else value

    def latency(self, sender: Worker, receiver: Worker) -> float:
        """Time a boundary tensor travels from one worker to another."""
        return self.send if sender.pipeline == receiver.pipeline or self.send_rerouted is None else self.send_rerouted

    # ---- the remainder of a broken step

    @property
    def remainder(self) -> bool:
        """Is this what is left of a broken step?"""
        return self.done is not None or self.busy_until is not None or self.committed is not None

    @cached_property
    def finished(self) -> frozenset[int]:
        """Stages whose optimizer step is done."""
        return frozenset(self.committed or ())

    @cached_property
    def busy(self) -> dict[Worker, float]:
        """When live workers are free that are not free at once."""
        given = ((Worker.parse(key), float(t)) for key, t in (self.busy_until or {}).items())
        return {w: t for w, t in given if w not in self.dead and t > 0}

    @cached_property
    def progress(self) -> Progress:
        """What is done, in finished stages too."""
        return self.done if isinstance(self.done, Progress) else Progress.of(self, tuple(self.done or ()))

    @cached_property
    def open(self) -> np.ndarray:
        """(P,) bool: the stages that are not finished."""
        return ~np.isin(np.arange(self.stages), list(self.finished))

    @cached_property
    def begun(self) -> dict[tuple[MicroBatch, int], Begun]:
        """(micro-batch, stage) -> what a live worker has done of it, in stages that are not finished."""
        of, keys = self.progress, self.microbatch_keys()
        sets = [frozenset(kind for kind in KINDS if bits & BIT[kind]) for bits in range(1 << len(KINDS))]
        return {
            (keys[g], s): Begun(Worker(int(of.host[g, s]), s), sets[of.kinds[g, s]])
            for g, s in np.argwhere((of.host >= 0) & self.open).tolist()
        }

    @cached_property
    def held(self) -> dict[Worker, float]:
        """Micro-batches in flight at time 0, by worker."""
        of = self.progress
        g, s = np.nonzero((of.host >= 0) & ((of.kinds & WEIGHTS) == 0) & self.open)
        found = np.zeros((self.pipelines, self.stages))
        np.add.at(found, (of.host[g, s], s), np.where(of.kinds[g, s] & BIT["I"], 1 - self.i_release, 1.0))
        return {Worker(d, s): float(found[d, s]) for d, s in np.argwhere(found).tolist()}


def _plain(value: Any) -> Any:
    """JSON values of tuples, sets and mappings."""
    if isinstance(value, Done):
        return value._asdict() | {"microbatch": list(value.microbatch), "worker": list(value.worker)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (tuple, list, set, frozenset)):
        return [_plain(v) for v in value]
    return value


__all__ = ["CHOICES", "OP_SETS", "Begun", "Problem"]
