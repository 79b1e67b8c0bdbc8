"""A job of D x P workers, with the durations of its layers and the sizes of their state.

job = Job.of(pipelines=6, stages=4, microbatches=32, layers=96, durations={"F": 0.1, "I": 0.1, "W": 0.1})
job.problem.replace(failed=[...])        # the planner's input, in seconds
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

from recycle_schedules import Problem, Worker, plan_layout
from recycle_schedules.layers import TIMES, Layout
from recycle_schedules.op_kinds import SPLIT

Shape = tuple[int, ...]
"""Number of live workers of each stage: (P,). A plan's length depends on nothing else, because all pipelines are
alike."""


@dataclass(frozen=True)
class Job:
    """The job to simulate.

    problem       the planner's problem, with `layers` and without deaths; times in seconds
    layer_bytes   bytes of each layer's state (weights and moments), sent to a worker that takes over the layer
    tokens        tokens per step; 0 if unknown
    source        origin of the durations, for the report
    """

    problem: Problem
    layer_bytes: tuple[float, ...]
    tokens: int = 0
    source: str = "flags"

    @classmethod
    def of(
        cls, *, pipelines: int, stages: int, microbatches: int, layers: int = 96,
        durations: Mapping[str, float | Sequence[float]] | None = None, worker_bytes: float = 16e9,
        memory: Any = None, optimizer: str = "staggered", send: float = 0.0, allreduce: Any = 0.0, **other: Any,
    ) -> Job:  # fmt: skip
        """A job whose layers are alike within each stage.

        durations      seconds of F, I, W and O: the mean over the stages, or one number per stage. A stage's seconds
                       are spread evenly over its layers
        worker_bytes   bytes of a worker's state
        send           seconds that a message takes
        allreduce      seconds that the sum of a stage's gradients takes

        Raises ValueError for an impossible job."""
        if layers < stages:
            raise ValueError(f"--layers {layers}: each of the {stages} stages needs at least one")
        layout = even(layers, stages)
        given: dict[str, Any] = {**dict.fromkeys(SPLIT, 0.1), **(durations or {})}
        each: dict[str, list[float]] = {}
        for kind, value in given.items():
            of_stages = list(value) if isinstance(value, Sequence) else [value * n * stages / layers for n in layout]
            if len(of_stages) != stages:
                raise ValueError(f"--durations {kind}: must be one number, or one for each of the {stages} stages")
            each[kind] = [t / n for t, n in zip(of_stages, layout, strict=True) for _ in range(n)]
        problem = Problem(
            pipelines=pipelines, stages=stages, microbatches=microbatches, layers=each,
            memory_limit=memory, optimizer=optimizer, send=send, allreduce=allreduce,
        )  # fmt: skip
        if not any(t for kind in SPLIT for t in each[kind]):
            raise ValueError("--durations: at least one of F, I and W must be above 0")
        return cls(problem, (worker_bytes * stages / layers,) * layers, **other)

    def faster(self, speed: float) -> Job:
        """The same job on machines that are `speed` times as fast."""
        layers = dict(self.problem.layers or {})
        layers |= {kind: [t / speed for t in layers[kind]] for kind in TIMES if kind in layers}
        return replace(self, problem=self.problem.replace(layers=layers))

    def reshaped(self, pipelines: int, stages: int) -> Job:
        """The same layers and global batch in a different shape. Micro-batches per pipeline are rounded up."""
        each = -(-self.total // pipelines)
        problem = self.restaged(stages, pipelines=pipelines, microbatches=each)
        tokens = self.tokens * pipelines * each // self.total
        return replace(self, problem=problem, tokens=tokens)

    def restaged(self, stages: int, **keys: Any) -> Problem:
        """The problem with a different number of stages, and with these keys. If each stage had its own time to sum
        gradients, all new stages get the mean."""
        sums = self.problem.allreduce
        if stages != self.stages and isinstance(sums, Sequence):
            keys["allreduce"] = fmean(sums)
        return self.problem.replace(stages=stages, **keys)

    @property
    def pipelines(self) -> int:
        return self.problem.pipelines

    @property
    def stages(self) -> int:
        return self.problem.stages

    @property
    def workers(self) -> int:
        return self.pipelines * self.stages

    @cached_property
    def total(self) -> int:
        """Micro-batches per step."""
        return self.problem.total

    @cached_property
    def whole(self) -> Shape:
        """The shape with no deaths."""
        return (self.pipelines,) * self.stages

    @cached_property
    def layout(self) -> Layout:
        """The number of layers of each stage with no deaths. Only the policy `rebalanced` changes it."""
        found = plan_layout(self.problem).layout
        assert found is not None
        return found

    @cached_property
    def work(self) -> float:
        """Seconds that all F, I and W of a step would take on a single worker, without bubbles."""
        sums = self.problem.model.sums
        return self.total * sum(float(sums[kind][-1]) for kind in SPLIT)

    def stage_seconds(self, layout: Layout) -> tuple[float, ...]:
        """Seconds of F, I and W together for one micro-batch, by stage: (P,)."""
        times = self.problem.model.durations(layout)
        return tuple(map(sum, zip(*(times[kind] for kind in SPLIT), strict=True)))

    def state_bytes(self, layout: Layout) -> float:
        """Bytes of a worker's state, at the stage where it is largest."""
        ends = [sum(layout[: s + 1]) for s in range(self.stages)]
        return max(math.fsum(self.layer_bytes[e - n : e]) for e, n in zip(ends, layout, strict=True))

    def moved_bytes(self, before: Layout, after: Layout) -> float:
        """Bytes that a worker receives when the boundaries between stages move, at the stage that receives most."""
        most, a, b = 0.0, 0, 0
        for had, has in zip(before, after, strict=True):
            new = [k for k in range(b, b + has) if not a <= k < a + had]
            most = max(most, math.fsum(self.layer_bytes[k] for k in new))
            a, b = a + had, b + has
        return most

    def with_shape(self, shape: Shape) -> Problem:
        """The job's problem, with `shape` live workers. The dead workers are spread over the pipelines."""
        D = self.pipelines
        dead = [
            Worker((k * D // (D - n) + s) % D, s) for s, n in enumerate(shape) if n < D for k in range(D - n)
        ]  # fmt: skip
        return self.problem.replace(failed=dead)


def even(things: int, places: int) -> Layout:
    """`things` split as evenly as possible, with the remainder on the first places."""
    return tuple(things // places + (k < things % places) for k in range(places))
