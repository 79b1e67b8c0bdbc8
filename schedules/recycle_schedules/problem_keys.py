"""The keys of a Problem, and the values that follow from them.

    problem.live[2], problem.duration(OpKind.FORWARD, Worker(0, 2)), problem.limits, problem.held

`problem_checks.check` converts the keys to canonical form (tuples, Workers).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np

from .memory import Memory, Mode
from .op_kinds import KINDS, SPLIT, WHOLE, OpKind
from .ops import MicroBatch, Worker
from .progress import BIT, WEIGHTS, Progress

CHOICES = {
    "backward": ("decoupled", "coupled", "mixed"),
    "optimizer": ("staggered", "barrier", "none"),
    "reroute": ("failed_only", "any"),
}
OP_SETS = {
    "decoupled": (frozenset(SPLIT),),
    "coupled": (frozenset(WHOLE),),
    "mixed": (frozenset(SPLIT), frozenset(WHOLE)),
}
"""The possible sets of ops for one micro-batch at one stage, by `backward`."""


class Begun(NamedTuple):
    """The live worker that started a micro-batch at a stage, and the kinds of ops it has finished there."""

    worker: Worker
    kinds: frozenset[OpKind]


@dataclass(frozen=True)
class ProblemKeys:
    """The planner's input, unchecked (`Problem` is checked). All times are in one unit of the caller's choice.

    pipelines      D
    stages         P; worker W(d, s) runs stage s of pipeline d
    microbatches   micro-batches per pipeline: one number for all, or one per pipeline
    failed         the dead workers
    durations      {"F", "I", "W", "B", "O"}: one time, or one per stage; defaults F = I = W = 1, B = I + W, O = 0
    backward       "decoupled" (I and W) | "coupled" (B) | "mixed" (either, per micro-batch and stage)
    whole          with "mixed": stages that must run every backward as a B
    optimizer      "staggered" (each stage steps by itself) | "barrier" (all stages together) | "none"
    memory_limit   maximum number of micro-batches in flight on a worker, from the start of F to the end of W or B:
                   None | number | one per stage | {"base": "1f1b", "extra": k} = P - s + k |
                   {"per_worker": {"d,s": n}, "default": n}
    memory         {"capacity", "stages"}: bytes available on a worker, and bytes used by its stage (memory.py). Besides
                   `memory_limit`, they give a second limit, which changes with the live workers. With "recomputed",
                   stages short of memory run whole backwards, and if that is not enough they recompute. Plan files
                   contain the resulting limits and durations instead
    i_release      share in [0, 1] of a micro-batch's memory that the end of I frees
    send           latency between adjacent stages
    send_rerouted  latency between adjacent stages of different pipelines; default: `send`
    links          hosts, and the latency and bandwidth of the links between them (links.py), instead of `send`
    layers         {"F", "I", "W", "O", "bytes", "activation_bytes"}: a number per layer (layers.py), instead of
                   durations; then the planner also chooses the stage boundaries (`plan_layout`)
    capacity_bytes with layers: bytes available on a worker for its layers and their micro-batches in flight
    allreduce      time from a stage's last gradient to its optimizer steps; one time for all stages, or one per stage
    reroute        "failed_only": a micro-batch leaves its pipeline only at stages with a dead worker | "any"
    speed          {"d,s": x}: an op on that worker takes duration / x
    done           [Done] | Progress: the ops that are done
    busy_until     {"d,s": t}: the time at which a worker becomes free
    committed      [stage]: stages whose optimizer step is done. Any of `done`, `busy_until` and `committed` makes the
                   problem a remainder, the rest of a broken step; time 0 is now
    name           a label, without effect on the plan
    """

    pipelines: int
    stages: int
    microbatches: int | tuple[int, ...]
    failed: Sequence[tuple[int, int]] = ()
    durations: Mapping[str, Any] = field(default_factory=dict)
    backward: str = "mixed"
    whole: Sequence[int] = ()
    optimizer: str = "staggered"
    memory_limit: Any = None
    i_release: float = 0.0
    send: float = 0.0
    send_rerouted: float | None = None
    links: Mapping[str, Any] | None = None
    allreduce: Any = 0.0
    reroute: str = "failed_only"
    speed: Mapping[str, float] = field(default_factory=dict)
    done: Any = None
    busy_until: Mapping[str, float] | None = None
    committed: Sequence[int] | None = None
    layers: Mapping[str, Any] | None = None
    capacity_bytes: float | None = None
    memory: Mapping[str, Any] | None = None
    name: str | None = None

    def replace(self, **changes: Any) -> Self:
        """A copy with some keys changed. None resets a key to its default."""
        kept = {f.name: getattr(self, f.name) for f in fields(self)} | changes
        return type(self)(**{key: value for key, value in kept.items() if value is not None})

    # ---- derived values

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
        """(D + 1,) int64: global id of the first micro-batch of each pipeline, then the total."""
        return np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)])

    def microbatch_keys(self) -> list[MicroBatch]:
        """All micro-batches, by global id."""
        return [(d, i) for d, m in enumerate(self.counts) for i in range(m)]

    @cached_property
    def dead(self) -> frozenset[Worker]:
        """The dead workers."""
        return frozenset(Worker(*each) for each in self.failed)

    @cached_property
    def live(self) -> tuple[tuple[int, ...], ...]:
        """For every stage, the pipelines with a live worker, ascending."""
        every = tuple(range(self.pipelines))  # shared, because most stages of a large job have no dead worker
        hit = {w.stage for w in self.dead}
        return tuple(
            tuple(d for d in every if (d, s) not in self.dead) if s in hit else every for s in range(self.stages)
        )

    def workers(self) -> list[Worker]:
        """All live workers, pipeline by pipeline."""
        every = (Worker(d, s) for d in range(self.pipelines) for s in range(self.stages))
        return [w for w in every if w not in self.dead]

    def per_stage(self, key: str) -> tuple[float, ...]:
        """(P,) durations at speed 1. key: an OpKind or "allreduce"."""
        return self._per_stage[key]

    @cached_property
    def _per_stage(self) -> dict[str, tuple[float, ...]]:
        if self.layers is not None:
            raise ValueError("layers: the durations of a stage depend on the layout; use plan_layout(problem)")
        defaults: dict[str, Any] = {**dict.fromkeys(SPLIT, 1.0), OpKind.OPTIMIZER: 0.0}
        given = defaults | dict(self.durations) | {"allreduce": self.allreduce}
        wide = {
            k: tuple(map(float, v)) if isinstance(v, (list, tuple)) else (float(v),) * self.stages
            for k, v in given.items()
        }
        forward, backward_input, backward_weight = (wide[kind] for kind in SPLIT)
        both = tuple(i + w for i, w in zip(backward_input, backward_weight, strict=True))
        wide.setdefault(OpKind.BACKWARD, both)
        for kind in KINDS:
            if kind.recomputes:
                wide[kind] = tuple(
                    t + again * f for t, f, again in zip(wide[kind], forward, self.recomputes, strict=True)
                )
        return wide

    @cached_property
    def speeds(self) -> dict[Worker, float]:
        """The given speeds. A worker without an entry has speed 1."""
        return {Worker.parse(key): float(x) for key, x in self.speed.items()}

    def duration(self, kind: OpKind, worker: Worker) -> float:
        """Duration of an op of this kind on a worker."""
        return self._per_stage[kind][worker.stage] / self.speeds.get(worker, 1.0)

    @cached_property
    def bytes(self) -> Memory | None:
        """The parsed key `memory`, None if it is not given."""
        return None if self.memory is None else Memory.of(self.memory, self.stages)

    @cached_property
    def modes(self) -> tuple[Mode, ...] | None:
        """The execution mode of each stage, chosen by its memory. None if `memory` is not given."""
        if self.bytes is None:
            return None
        lists = [[Worker(d, s) for d in pipelines] for s, pipelines in enumerate(self.live)]
        ran = [-(-self.total // max(1, len(workers))) for workers in lists]
        return tuple(self.bytes.mode(s, self.backward, workers, ran[s]) for s, workers in enumerate(lists))

    @property
    def recomputes(self) -> tuple[bool, ...]:
        """(P,): whether the stage recomputes its layers in I and B to save memory."""
        return tuple(mode.recompute for mode in self.modes) if self.modes else (False,) * self.stages

    @property
    def coupled(self) -> tuple[bool, ...]:
        """(P,): whether the stage runs every backward as a B, except for backwards that have already begun."""
        by_bytes = [mode.whole for mode in self.modes] if self.modes else [False] * self.stages
        return tuple(self.backward == "coupled" or s in self.whole or by_bytes[s] for s in range(self.stages))

    @property
    def limits_alike(self) -> bool:
        """Whether all workers of a stage have the same limit."""
        per_worker = isinstance(self.memory_limit, Mapping) and "per_worker" in self.memory_limit
        return not per_worker and (self.bytes is None or self.bytes.alike)

    def limit(self, worker: Worker) -> float:
        """Maximum number of micro-batches in flight on a worker, math.inf if there is no limit."""
        counted = self._counted_limit(worker)
        if self.bytes is None or self.modes is None:
            return counted
        peers = max(1, len(self.live[worker.stage]))
        return min(counted, self.bytes.limit(worker, self.modes[worker.stage], peers, -(-self.total // peers)))

    def room(self, worker: Worker) -> float:
        """Bytes that stay free on a worker even with its maximum number of micro-batches in flight. math.inf without
        `memory`."""
        if self.bytes is None or self.modes is None:
            return math.inf
        peers = max(1, len(self.live[worker.stage]))
        ran = -(-self.total // peers)
        return self.bytes.room(worker, self.modes[worker.stage], peers, ran, min(ran, self.limit(worker)))

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
        """(D * P,) float64: `limit` of worker d * P + s, dead workers included."""
        D, P = self.pipelines, self.stages
        if not self.limits_alike:
            return np.array([self.limit(Worker(d, s)) for d in range(D) for s in range(P)], dtype=float)
        return np.tile([float(self.limit(Worker(0, s))) for s in range(P)], D)

    # ---- the remainder of a broken step

    @property
    def remainder(self) -> bool:
        """Whether this is the remainder of a broken step."""
        return self.done is not None or self.busy_until is not None or self.committed is not None

    @cached_property
    def finished(self) -> frozenset[int]:
        """Stages whose optimizer step is done."""
        return frozenset(self.committed or ())

    @cached_property
    def busy(self) -> dict[Worker, float]:
        """The live workers that are not free at time 0, and the time at which each becomes free."""
        given = ((Worker.parse(key), float(t)) for key, t in (self.busy_until or {}).items())
        return {w: t for w, t in given if w not in self.dead and t > 0}

    @cached_property
    def progress(self) -> Progress:
        """The ops that are done at time 0, including those of finished stages."""
        if isinstance(self.done, Progress):
            return self.done
        return Progress.of(tuple(self.done or ()), self.first, self.stages, self.dead)

    @cached_property
    def open(self) -> np.ndarray:
        """(P,) bool: the stages that are not finished."""
        return ~np.isin(np.arange(self.stages), list(self.finished))

    @cached_property
    def begun(self) -> dict[tuple[MicroBatch, int], Begun]:
        """The micro-batches started by live workers at unfinished stages, by (micro-batch, stage)."""
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
        had_i = of.kinds[g, s] & BIT[OpKind.BACKWARD_INPUT]
        np.add.at(found, (of.host[g, s], s), np.where(had_i, 1 - self.i_release, 1.0))
        return {Worker(d, s): float(found[d, s]) for d, s in np.argwhere(found).tolist()}
