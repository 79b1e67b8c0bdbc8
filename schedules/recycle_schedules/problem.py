"""The planner's input: job shape, live workers, durations, memory, finished work.

    problem = Problem(pipelines=3, stages=4, microbatches=6, failed=[(1, 2)], memory_limit={"base": "1f1b", "extra": 2})
    Problem.from_json(json.load(file)).replace(failed=[])

The keys are those of problem files (docs/planner.md); `ProblemKeys` documents them. The constructor checks everything,
so every Problem has a schedule. For bad input it raises a ValueError, whose message is one sentence that starts with
the key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from .graph import StageGraph
from .layers import Layers
from .op_kinds import KINDS
from .ops import Done, Worker
from .problem_checks import check
from .problem_keys import Begun, ProblemKeys
from .progress import Progress

Json = dict[str, Any]


@dataclass(frozen=True)
class Problem(ProblemKeys):
    """The planner's input: the keys of `ProblemKeys`, checked and immutable."""

    def __post_init__(self) -> None:
        check(self)

    # ---- JSON

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Problem:
        """The problem from the keys of a file. Raises ValueError if it is malformed or has no schedule; the message is
        one sentence."""
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
        """The keys that differ from their defaults, as plain JSON values.

        Instead of `memory`, the output contains the `memory_limit` and the durations derived from it, so that a plan
        can be validated without the memory model."""
        if self.memory is not None:
            return self.without_bytes.to_json()
        out: Json = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Progress):
                value = tuple(value.entries(self.microbatch_keys()))
            empty = value is None or (f.name in ("failed", "whole", "speed", "durations") and not value)
            if not empty and value != f.default:
                out[f.name] = _plain(value)
        return out

    @cached_property
    def graph(self) -> StageGraph:
        """The live workers and the message times between them."""
        return StageGraph(self)

    # ---- layers

    @cached_property
    def model(self) -> Layers:
        """The layers from the key `layers`. Raises ValueError if the problem has none."""
        if self.layers is None:
            raise ValueError("layers: missing, so there is no layout to plan; give layers or use plan(problem)")
        return Layers.of(self.layers, self.stages)

    def with_layout(self, layout: Sequence[int]) -> Problem:
        """A copy of the problem with fixed stage boundaries. It contains durations per stage instead of per layer,
        and memory limits instead of `capacity_bytes`.

        layout: number of layers of each stage, (P,).

        Raises ValueError if the layout is invalid, or if a worker has too little memory left for a single
        micro-batch."""
        model = self.model
        layout = model.check(layout, self.stages)
        changes: Json = {"layers": None, "capacity_bytes": None, "durations": model.durations(layout)}
        if self.capacity_bytes is not None:
            most = model.in_flight(layout, self.capacity_bytes)
            if min(most) < 1:
                raise ValueError(f"capacity_bytes: stage {most.index(min(most))} has no room for one micro-batch")
            changes["memory_limit"] = self.counted_limits(most)
        return self.replace(**changes)

    def counted_limits(self, most: Sequence[float]) -> Any:
        """The problem's limits, capped at `most` (P,), in the form of the key `memory_limit`."""
        limits = {w: min(self.limit(w), most[w.stage]) for w in self.workers()}
        per_stage = [{limits[Worker(d, s)] for d in self.live[s]} for s in range(self.stages)]
        if all(len(values) == 1 for values in per_stage):
            return [_limit(values.pop()) for values in per_stage]
        return {"per_worker": {f"{w.pipeline},{w.stage}": _limit(n) for w, n in limits.items()}, "default": None}

    @cached_property
    def without_bytes(self) -> Problem:
        """A copy of the problem without `memory`. The values derived from it are set instead: limits, the stages that
        run whole backwards, and the durations of stages that recompute."""
        if self.memory is None:
            return self
        return self.replace(
            memory=None,
            memory_limit=self.counted_limits([math.inf] * self.stages),
            whole=[s for s in range(self.stages) if self.coupled[s]] if self.backward == "mixed" else None,
            durations={kind: self.per_stage(kind) for kind in KINDS} if any(self.recomputes) else self.durations,
        )

    def __hash__(self) -> int:
        return hash(repr(self))

    def __getstate__(self) -> Json:
        """The keys, for `pickle`, without values derived from them."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def _limit(n: float) -> float | None:
    """A limit in the form of problem files, where None is no limit."""
    return None if n == math.inf else n


def _plain(value: Any) -> Any:
    """Tuples, sets, mappings and Done entries as JSON values."""
    if isinstance(value, Done):
        return value._asdict() | {"microbatch": list(value.microbatch), "worker": list(value.worker)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (tuple, list, set, frozenset)):
        return [_plain(v) for v in value]
    return value


__all__ = ["Begun", "Problem"]
