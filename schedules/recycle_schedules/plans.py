"""Plans: the worker and the time of every op, as flat arrays.

plan = Plan.load("plan.json")
plan.period, plan.makespan, plan.lower_bound, plan.gap
for op in plan.ops: ...            # yields Op tuples
plan.of(Worker(1, 2))              # the ops of one worker, in execution order
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from .layers import Layout
from .op_kinds import KINDS, O, OpKind
from .ops import MicroBatch, Op, Worker
from .problem import Problem

Json = dict[str, Any]
_OP_KINDS = {str(kind): kind for kind in KINDS}


@dataclass(frozen=True, eq=False)
class OpArrays:
    """The ops of a schedule as columns of shape (n,)."""

    kind: np.ndarray  # uint8: index into KINDS
    microbatch: np.ndarray  # int32: global id, -1 for O
    stage: np.ndarray  # int16
    pipeline: np.ndarray  # int16: pipeline of the executing worker
    start: np.ndarray  # float64
    end: np.ndarray  # float64

    @classmethod
    def of(cls, problem: Problem, ops: Iterable[Op]) -> OpArrays:
        """The columns of `ops`, in the same order."""
        offset = problem.first.tolist()

        def number(mb: MicroBatch | None) -> int:
            return -1 if mb is None else offset[mb[0]] + mb[1]

        rows = [(o.kind.code, number(o.microbatch), o.stage, o.worker.pipeline, o.start, o.end) for o in ops]
        columns = zip(*rows, strict=True) if rows else [()] * 6
        types = (np.uint8, np.int32, np.int16, np.int16, np.float64, np.float64)
        return cls(*(np.array(c, dtype=t) for c, t in zip(columns, types, strict=True)))

    def __len__(self) -> int:
        return len(self.kind)

    def take(self, index: Any) -> OpArrays:
        """The ops that a numpy index or mask selects."""
        return OpArrays(*(getattr(self, f)[index] for f in self.__dataclass_fields__))


@dataclass(frozen=True, eq=False)
class Plan:
    """A schedule of a problem. Times are in `time_unit`. If the problem is a remainder (the rest of a broken step),
    time 0 is the moment from which the rest is planned.

    problem      the planned problem
    arrays       all ops
    lower_bound  no valid plan has a smaller `value`
    time_unit    name of the unit
    layout       number of layers of each stage, (P,), if the planner chose the stage boundaries (`plan_layout`). In
                 that case the lower bound covers all layouts, and `problem` has durations per stage instead of per
                 layer. In a trace: number of decoder layers of each stage during the step"""

    problem: Problem
    arrays: OpArrays
    lower_bound: float = 0.0
    time_unit: str = "slots"
    layout: Layout | None = field(default=None, kw_only=True)

    def __len__(self) -> int:
        return len(self.arrays)

    @property
    def ops(self) -> Iterator[Op]:
        """All ops, in the order of the arrays."""
        return self.listed(self.arrays)

    def of(self, worker: Worker) -> list[Op]:
        """The ops of one worker, in execution order."""
        a = self.arrays
        mine = a.take((a.stage == worker.stage) & (a.pipeline == worker.pipeline))
        return list(self.listed(mine.take(self.running_order(mine))))

    def running_order(self, arrays: OpArrays | None = None) -> np.ndarray:
        """Indices that sort ops by start, then end, then position in the micro-batch's chain (`chain_position`). The
        last key puts ops of zero duration after their dependencies."""
        a = self.arrays if arrays is None else arrays
        return np.lexsort((chain_position(a, self.problem.stages), a.end, a.start))

    def listed(self, a: OpArrays) -> Iterator[Op]:
        """Yield the ops of `a` as Op tuples."""
        keys: list[MicroBatch | None] = [*self.problem.microbatch_keys(), None]
        for k, g, s, d, t0, t1 in zip(
            a.kind.tolist(), a.microbatch.tolist(), a.stage.tolist(), a.pipeline.tolist(), a.start.tolist(),
            a.end.tolist(), strict=True,
        ):  # fmt: skip
            yield Op(KINDS[k], keys[g], s, Worker(d, s), t0, t1)

    # ---- duration

    @cached_property
    def makespan(self) -> float:
        """Time from the first start (for a remainder: from time 0) to the last end, optimizer steps included."""
        a = self.arrays
        if not len(a):
            return 0.0
        compute = a.start[a.kind != O]
        begin = 0.0 if self.problem.remainder else (compute if len(compute) else a.start).min()
        return float(a.end.max() - begin)

    @cached_property
    def period(self) -> float | None:
        """The smallest T for which the plan, repeated every T, is still valid. None if the problem is a remainder.

        With a staggered optimizer: the longest time that any worker takes from its first op to the end of its optimizer
        step. Otherwise: the makespan."""
        if self.problem.remainder:
            return None
        a = self.arrays
        if self.problem.optimizer != "staggered" or not len(a):
            return self.makespan
        worker = a.pipeline.astype(np.int64) * self.problem.stages + a.stage
        first = np.full(self.problem.pipelines * self.problem.stages, np.inf)
        np.minimum.at(first, worker, a.start)
        spans = (a.end - first[worker])[a.kind == O]
        return float(spans.max()) if len(spans) else self.makespan

    @property
    def value(self) -> float:
        """The planner's objective: the period of a whole step, the makespan of a remainder."""
        return self.makespan if self.period is None else self.period

    @property
    def gap(self) -> float:
        """The amount by which `value` exceeds the lower bound, as a share of the bound."""
        return self.value / self.lower_bound - 1 if self.lower_bound else 0.0

    # ---- files

    def to_json(self) -> Json:
        """The plan as JSON values, in the format of plan files (docs/planner.md)."""
        problem = self.problem.to_json()
        whole = problem.pop("whole", None)  # next to the problem, because it restricts only the planner
        return {
            "version": 1,
            "time_unit": self.time_unit,
            **({} if self.layout is None else {"layout": list(self.layout)}),
            **({} if whole is None else {"whole": whole}),
            "problem": problem,
            "makespan": self.makespan,
            "period": self.period,
            "lower_bound": self.lower_bound,
            "ops": [op.to_json() for op in self.ops],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The plan from the keys of a plan file. Raises ValueError if it is malformed; the message is one sentence."""
        problem, ops = read_problem_and_ops(data)
        bound = float(data.get("lower_bound", 0.0))
        layout = data.get("layout")
        if layout is not None and (not isinstance(layout, list) or len(layout) != problem.stages):
            raise ValueError(f"layout: expected {problem.stages} numbers of layers, one per stage, not {layout!r}")
        unit = str(data.get("time_unit", "slots"))
        return cls(problem, OpArrays.of(problem, ops), bound, unit, layout=None if layout is None else tuple(layout))

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file. Raises OSError if that fails."""
        Path(path).write_text(json.dumps(self.to_json()))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The plan in a JSON file. Raises ValueError if the content is not a plan, OSError if the file cannot be
        read."""
        try:
            data = json.loads(Path(path).read_text())
        except json.JSONDecodeError as e:
            raise ValueError(f"{path}: not JSON ({e})") from None
        return cls.from_json(data)


def chain_position(a: OpArrays, stages: int) -> np.ndarray:
    """Position of each op in its micro-batch's chain, shape (n,): F of stage s is s, I or B is 2P - 1 - s, W is 2P, O
    is 2P + 1."""
    s = a.stage.astype(np.int64)
    back = 2 * stages - 1 - s
    return np.choose(a.kind, [s, back, np.full_like(s, 2 * stages), back, np.full_like(s, 2 * stages + 1)])


def read_problem_and_ops(data: Mapping[str, Any]) -> tuple[Problem, list[Op]]:
    """The problem and the ops from the JSON of a plan or trace. Raises ValueError if it is malformed; the message is
    one sentence."""
    if not isinstance(data, Mapping) or not {"problem", "ops"} <= set(data):
        raise ValueError("a plan needs the keys problem and ops")
    whole = {"whole": data["whole"]} if "whole" in data and isinstance(data["problem"], Mapping) else {}
    problem = Problem.from_json({**data["problem"], **whole} if whole else data["problem"])
    ops = [read_op(problem, entry) for entry in data["ops"]]
    return problem, ops


def read_op(problem: Problem, entry: Any) -> Op:
    """The op of one file entry. Raises ValueError if it is malformed or does not fit the problem's shape."""
    try:
        kind, mb, s, w = _OP_KINDS[entry["op"]], entry["microbatch"], entry["stage"], Worker(*entry["worker"])
        op = Op(kind, None if mb is None else (mb[0], mb[1]), s, w, float(entry["start"]), float(entry["end"]))
    except (KeyError, TypeError, ValueError, IndexError):
        raise ValueError(f"ops: malformed entry {entry!r}") from None
    ints = [op.stage, *op.worker, *(op.microbatch or ())]
    fine = (
        (op.microbatch is None) == (kind is OpKind.OPTIMIZER)
        and all(isinstance(x, int) and not isinstance(x, bool) for x in ints)
        and 0 <= w.pipeline < problem.pipelines
        and 0 <= op.stage == w.stage < problem.stages
        and math.isfinite(op.start)
        and math.isfinite(op.end)
    )
    if fine and op.microbatch is not None:
        d, i = op.microbatch
        fine = 0 <= d < problem.pipelines and 0 <= i < problem.counts[d]
    if not fine:
        raise ValueError(f"ops: entry {entry!r} does not fit the problem")
    return op
