"""The keys of a Problem and what they mean.

    problem.live[2], problem.duration("F", Worker(0, 2)), problem.limits, problem.held

Values are in canonical form (tuples, Workers) once `problem_checks.check` has seen them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np

from .memory import Memory, Way
from .ops import KINDS, Done, MicroBatch, Worker
from .progress import BIT, WEIGHTS, Progress

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
    """The live worker that has begun a micro-batch at a stage, and the kinds of ops that it has done of it there."""

    worker: Worker
    kinds: frozenset[str]


@dataclass(frozen=True)
class ProblemKeys:
    """The planner's input, unchecked (`Problem` is checked). Times are numbers in any one unit.

    pipelines      D
    stages         P; worker W(d, s) runs stage s of pipeline d
    microbatches   per pipeline: a number, or one per pipeline
    failed         the workers that are not there
    durations      {"F", "I", "W", "B", "O"}: a time, or one per stage; defaults F = I = W = 1, B = I + W, O = 0
    backward       "decoupled" (I and W) | "coupled" (B) | "mixed" (either, per micro-batch and stage)
    whole          stages at which every backward is a B where others may choose ("mixed")
    optimizer      "staggered" (each stage steps by itself) | "barrier" (all together) | "none"
    memory_limit   most micro-batches in flight (from the start of F to the end of W or B) on a worker: None | number |
                   one per stage | {"base": "1f1b", "extra": k} = P - s + k | {"per_worker": {"d,s": n}, "default": n}
    memory         {"capacity", "stages"}: what a worker has and what its stage holds, in bytes (memory.py): a limit
                   beside `memory_limit` that follows who lives. With "recomputed" stages without room run whole
                   backwards, and then recompute. A plan's file has the limits and durations that came of it
    i_release      share in [0, 1] of a micro-batch's memory that the end of I frees
    send           latency between adjacent stages; send_rerouted: between different pipelines (default: send)
    links          hosts, and the latency and bandwidth of the links between them (links.py), instead of `send`
    layers         {"F", "I", "W", "O", "bytes", "activation_bytes"}: a number per layer (layers.py), instead of
                   durations: then the boundaries between stages are part of the plan (`plan_layout`)
    capacity_bytes with layers: what a worker has for its layers and for the micro-batches in flight through them
    allreduce      time from a stage's last gradient to its optimizer steps; one per stage or one for all
    reroute        "failed_only": micro-batches leave their pipeline only where its worker is dead | "any"
    speed          {"d,s": x}: that worker takes duration / x
    done [Done] | Progress, busy_until {"d,s": t}, committed [stage]
                   with any of them: the remainder of a broken step; time 0 is now
    """

    pipelines: int
    stages: int
    microbatches: int | tuple[int, ...]
    failed: Iterable[tuple[int, int]] = ()
    durations: Mapping[str, Any] = field(default_factory=dict)
    backward: str = "mixed"
    whole: Iterable[int] = ()
    optimizer: str = "staggered"
    memory_limit: Any = None
    i_release: float = 0.0
    send: float = 0.0
    send_rerouted: float | None = None
    links: Mapping[str, Any] | None = None
    allreduce: Any = 0.0
    reroute: str = "failed_only"
    speed: Mapping[str, float] = field(default_factory=dict)
    done: Iterable[Done] | Progress | None = None
    busy_until: Mapping[str, float] | None = None
    committed: Iterable[int] | None = None
    layers: Mapping[str, Any] | None = None
    capacity_bytes: float | None = None
    memory: Mapping[str, Any] | None = None
    name: str | None = None

    def replace(self, **changes: Any) -> Self:
        """The same problem with other values of some keys (None: back to the default)."""
        kept = {f.name: getattr(self, f.name) for f in fields(self)} | changes
        return type(self)(**{key: value for key, value in kept.items() if value is not None})

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
        """The workers that are not there."""
        return frozenset(Worker(*each) for each in self.failed)

    @cached_property
    def live(self) -> tuple[tuple[int, ...], ...]:
        """The pipelines of the live workers of every stage, ascending."""
        return tuple(tuple(d for d in range(self.pipelines) if (d, s) not in self.dead) for s in range(self.stages))

    def workers(self) -> list[Worker]:
        """All live workers, pipeline by pipeline."""
        every = (Worker(d, s) for d in range(self.pipelines) for s in range(self.stages))
        return [w for w in every if w not in self.dead]

    def per_stage(self, key: str) -> tuple[float, ...]:
        """(P,) times: the duration of F, I, W, B or O, or "allreduce", at speed 1."""
        return self._per_stage[key]

    @cached_property
    def _per_stage(self) -> dict[str, tuple[float, ...]]:
        if self.layers is not None:
            raise ValueError("layers: how long a stage takes depends on the layout; plan_layout(problem) finds one")
        given = {"F": 1.0, "I": 1.0, "W": 1.0, "O": 0.0} | dict(self.durations) | {"allreduce": self.allreduce}
        wide = {
            k: tuple(map(float, v)) if isinstance(v, (list, tuple)) else (float(v),) * self.stages
            for k, v in given.items()
        }
        wide.setdefault("B", tuple(i + w for i, w in zip(wide["I"], wide["W"], strict=True)))
        for kind in "IB":
            wide[kind] = tuple(
                t + again * f for t, f, again in zip(wide[kind], wide["F"], self.recomputes, strict=True)
            )
        return wide

    @cached_property
    def speeds(self) -> dict[Worker, float]:
        """The speeds that are given, by worker; all others are 1."""
        return {Worker.parse(key): float(x) for key, x in self.speed.items()}

    def duration(self, kind: str, worker: Worker) -> float:
        """How long an op of this kind takes on a worker."""
        return self._per_stage[kind][worker.stage] / self.speeds.get(worker, 1.0)

    @cached_property
    def bytes(self) -> Memory | None:
        """What the key `memory` says."""
        return None if self.memory is None else Memory.of(self.memory, self.stages)

    @cached_property
    def ways(self) -> tuple[Way, ...] | None:
        """How each stage gets on with its bytes; None where none are given."""
        if self.bytes is None:
            return None
        lists = [[Worker(d, s) for d in pipelines] for s, pipelines in enumerate(self.live)]
        ran = [-(-self.total // max(1, len(workers))) for workers in lists]
        return tuple(self.bytes.way(s, self.backward, workers, ran[s]) for s, workers in enumerate(lists))

    @property
    def recomputes(self) -> tuple[bool, ...]:
        """(P,): does the stage run its layers again in I and B, because its bytes ask for it?"""
        return tuple(way.recompute for way in self.ways) if self.ways else (False,) * self.stages

    @property
    def coupled(self) -> tuple[bool, ...]:
        """(P,): is every backward that begins at the stage a B?"""
        by_bytes = [way.whole for way in self.ways] if self.ways else [False] * self.stages
        return tuple(self.backward == "coupled" or s in self.whole or by_bytes[s] for s in range(self.stages))

    @property
    def limits_alike(self) -> bool:
        """Have all workers of a stage the same limit?"""
        per_worker = isinstance(self.memory_limit, Mapping) and "per_worker" in self.memory_limit
        return not per_worker and (self.bytes is None or self.bytes.alike)

    def limit(self, worker: Worker) -> float:
        """Most micro-batches in flight on a worker; math.inf if there is no limit."""
        counted = self._counted_limit(worker)
        if self.bytes is None or self.ways is None:
            return counted
        peers = max(1, len(self.live[worker.stage]))
        return min(counted, self.bytes.limit(worker, self.ways[worker.stage], peers, -(-self.total // peers)))

    def _counted_limit(self, worker: Worker) -> float:
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

    @cached_property
    def limits(self) -> np.ndarray:
        """(D * P,) float64: `limit` of worker d * P + s, dead ones too."""
        D, P = self.pipelines, self.stages
        if not self.limits_alike:
            return np.array([self.limit(Worker(d, s)) for d in range(D) for s in range(P)], dtype=float)
        return np.tile([float(self.limit(Worker(0, s))) for s in range(P)], D)

    # ---- the remainder of a broken step

    @property
    def remainder(self) -> bool:
        """Is this what is left of a broken step, rather than a whole one?"""
        return self.done is not None or self.busy_until is not None or self.committed is not None

    @cached_property
    def finished(self) -> frozenset[int]:
        """Stages whose optimizer step is done."""
        return frozenset(self.committed or ())

    @cached_property
    def busy(self) -> dict[Worker, float]:
        """When those live workers are free that are not free at time 0."""
        given = ((Worker.parse(key), float(t)) for key, t in (self.busy_until or {}).items())
        return {w: t for w, t in given if w not in self.dead and t > 0}

    @cached_property
    def progress(self) -> Progress:
        """What is done at time 0, in finished stages too."""
        if isinstance(self.done, Progress):
            return self.done
        return Progress.of(tuple(self.done or ()), self.first, self.stages, self.dead)

    @cached_property
    def open(self) -> np.ndarray:
        """(P,) bool: the stages that are not finished."""
        return ~np.isin(np.arange(self.stages), list(self.finished))

    @cached_property
    def begun(self) -> dict[tuple[MicroBatch, int], Begun]:
        """What a live worker has done of a micro-batch at a stage, by (micro-batch, stage); stages that are not
        finished."""
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
