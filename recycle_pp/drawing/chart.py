"""The input of every picture: the ops of a Plan or a Trace as flat arrays, with one row per worker.

    chart = Chart.of(plan, title="adapted")
    for row in range(len(chart.workers)): chart.ops_of(row)     # a slice of the arrays, in the order of time

Rows are ordered by pipeline, and include dead workers. Times count from the first op, in the plan's unit; seconds are
converted to milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from recycle_schedules import KINDS, Plan, Problem, Trace, Worker
from recycle_schedules.op_kinds import B, F, I

from .recovery import Recovery
from .units import in_milliseconds

REROUTED, CUT, REDONE, LOST = 1, 2, 4, 8
"""Bits of `marks`:

REROUTED  the op runs outside its micro-batch's pipeline
CUT       the op did not finish, because its worker died or aborted it
REDONE    the op repeats a lost op
LOST      the op finished on a worker that died, and had to be redone
"""


@dataclass(frozen=True, eq=False)
class Chart:
    """Ops sorted by row and start. Arrays have shape (n,), except `first` with (rows + 1,).

    kind uint8 (code), microbatch int32 (global id, -1 for O), row int32 (pipeline * P + stage),
    start and end float64, marks uint8 (bits above); `first[r]:first[r + 1]` are the ops of row r."""

    title: str
    plan: Plan
    kind: np.ndarray
    microbatch: np.ndarray
    row: np.ndarray
    start: np.ndarray
    end: np.ndarray
    marks: np.ndarray
    first: np.ndarray
    recovery: Recovery | None

    @classmethod
    def of(cls, plan: Plan, title: str = "") -> Chart:
        plan = in_milliseconds(plan) if plan.time_unit == "s" else plan
        a, problem = plan.arrays, plan.problem
        row = a.pipeline.astype(np.int32) * problem.stages + a.stage
        order = np.lexsort((a.end, a.start, row))
        kind, microbatch, row = a.kind[order], a.microbatch[order].astype(np.int32), row[order]
        start, end = a.start[order], a.end[order]
        marks = np.zeros(len(kind), np.uint8)
        home = np.repeat(np.arange(problem.pipelines), problem.counts)
        has = microbatch >= 0
        marks[has] |= np.where(home[microbatch[has]] != row[has] // problem.stages, REROUTED, 0).astype(np.uint8)
        if isinstance(plan, Trace):
            marks |= np.array([{"cut": CUT, "redone": REDONE}.get(s, 0) for s in plan.status], np.uint8)[order]
            marks |= _lost(microbatch * np.int64(problem.stages) + row % problem.stages, kind, marks)
        origin = 0.0 if problem.remainder or not len(start) else float(start.min())
        rows = problem.pipelines * problem.stages
        first = np.searchsorted(row, np.arange(rows + 1))
        recovery = Recovery.of(plan, origin) if isinstance(plan, Trace) else None
        return cls(title, plan, kind, microbatch, row, start - origin, end - origin, marks, first, recovery)

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def problem(self) -> Problem:
        return self.plan.problem

    @property
    def unit(self) -> str:
        return self.plan.time_unit

    @cached_property
    def span(self) -> float:
        """Time from 0 to the last end; 1 if no op takes any time."""
        last = float(self.end.max(initial=0.0)) or 1.0
        return max(last, self.recovery.resumed) if self.recovery else last

    @cached_property
    def workers(self) -> list[Worker]:
        """The worker shown in each row."""
        return [Worker(d, s) for d in range(self.problem.pipelines) for s in range(self.problem.stages)]

    @cached_property
    def names(self) -> list[str]:
        """The label of each row: its worker, and the worker's host if the stage graph knows it."""
        hosts = [self.problem.graph.host(worker) for worker in self.workers]
        return [f"{worker} {host}" if host else str(worker) for worker, host in zip(self.workers, hosts, strict=True)]

    @cached_property
    def dead_from(self) -> dict[int, float]:
        """{row of a dead worker: time of death}. The time is 0 if the worker was never alive."""
        rows = [w.pipeline * self.problem.stages + w.stage for w in sorted(self.problem.dead)]
        return {r: float(self.end[self.ops_of(r)].max(initial=0.0)) for r in rows} | self._died_here

    @property
    def _died_here(self) -> dict[int, float]:
        if not self.recovery:
            return {}
        return {w.pipeline * self.problem.stages + w.stage: self.recovery.died for w in self.recovery.workers}

    def ops_of(self, row: int) -> slice:
        return slice(int(self.first[row]), int(self.first[row + 1]))

    def name(self, op: int) -> str:
        """The op in torch's notation, with the global micro-batch: 2F7."""
        microbatch = self.microbatch[op]
        return f"{self.row[op] % self.problem.stages}{KINDS[self.kind[op]]}{'' if microbatch < 0 else microbatch}"

    @cached_property
    def links(self) -> tuple[np.ndarray, np.ndarray]:
        """The boundary tensors as (indices of their sending ops, indices of their receiving ops), (tensors,) each.

        An `F` sends to the `F` of the next stage, an `I` or `B` to the `I` or `B` of the previous stage. If the sending
        op ran twice, its latest run that ended before the receiving op started is used.
        """
        P = self.problem.stages
        stage = self.row % P
        key = self.microbatch.astype(np.int64) * P + stage
        whole = (self.marks & CUT) == 0
        pairs: list[tuple[np.ndarray, np.ndarray]] = []
        for kinds, step in (((F,), 1), ((I, B), -1)):
            ops = np.flatnonzero(np.isin(self.kind, kinds))
            producers = ops[whole[ops]]
            producers = producers[np.lexsort((self.end[producers], key[producers]))]
            consumers = ops[(stage[ops] - step >= 0) & (stage[ops] - step < P)]
            if not len(producers) or not len(consumers):
                continue
            # `have` is sorted by key, then by end, so a search for `want` finds the last producer that ended in time
            width = self.span + 1.0
            have = key[producers] * width + self.end[producers]
            want = (key[consumers] - step) * width + self.start[consumers]
            at = np.maximum(np.searchsorted(have, want + 1e-6 * width, side="right") - 1, 0)
            late = key[producers[at]] != key[consumers] - step  # none ended in time (clocks differ), so takes the first
            at = np.minimum(at + late, len(producers) - 1)
            found = key[producers[at]] == key[consumers] - step
            pairs.append((producers[at[found]], consumers[found]))
        if not pairs:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        return np.concatenate([p[0] for p in pairs]), np.concatenate([p[1] for p in pairs])

    def alike(self) -> list[list[int]]:
        """Groups of pipelines whose rows look the same. A job of 64 pipelines with one death has few groups."""
        groups: dict[bytes, list[int]] = {}
        P = self.problem.stages
        M = np.append(np.concatenate([[0], np.cumsum(self.problem.counts)]), 0)
        for d in range(self.problem.pipelines):
            ops = slice(int(self.first[d * P]), int(self.first[(d + 1) * P]))
            local = np.where(self.marks[ops] & REROUTED, -2 - self.microbatch[ops], self.microbatch[ops] - M[d])
            local[self.microbatch[ops] < 0] = -1
            dead = [(r - d * P, t) for r, t in sorted(self.dead_from.items()) if d * P <= r < (d + 1) * P]
            parts = (self.kind[ops], local, self.row[ops] - d * P, self.start[ops], self.end[ops], self.marks[ops])
            look = b"".join(np.ascontiguousarray(p).tobytes() for p in parts) + repr(dead).encode()
            groups.setdefault(look, []).append(d)
        return list(groups.values())


def _lost(key: np.ndarray, kind: np.ndarray, marks: np.ndarray) -> np.ndarray:
    """(n,) uint8: LOST for each complete op that a redone op of the same micro-batch, stage and kind repeats, else 0.

    key: micro-batch * P + stage of each op."""
    same = np.where(kind == B, I, kind)  # a redone backward may be split even if the original was not, and vice versa
    ident = key * len(KINDS) + same
    again = ident[(marks & REDONE) != 0]
    return np.where(np.isin(ident, again) & ((marks & (REDONE | CUT)) == 0), LOST, 0).astype(np.uint8)


def shown_rows(chart: Chart, most_rows: int) -> tuple[list[list[int]], list[str]]:
    """Returns (groups, notes). groups: the rows to draw, from top to bottom, at most `most_rows` in all. notes:
    sentences about omitted rows.

    If all rows fit, each pipeline is a group. Otherwise each stage with a death is a group, with all of its workers if
    they fit. One worker of each other stage follows, if there is room. Without deaths, each group is a pipeline that
    represents all pipelines that look like it."""
    P, D = chart.problem.stages, chart.problem.pipelines
    if most_rows >= D * P or not chart.dead_from:
        shown, notes = shown_pipelines(chart, most_rows)
        return [list(range(d * P, (d + 1) * P)) for d in shown], notes
    hit = sorted({row % P for row in chart.dead_from})
    others = [s for s in range(P) if s not in hit]
    sample = others if len(others) <= most_rows // 3 else []
    room = max(2, (most_rows - len(sample)) // len(hit))
    first = min(chart.dead_from) // P
    groups = [_peers(chart, stage, room) for stage in hit[: max(1, (most_rows - len(sample)) // room)]]
    drawn = sum(map(len, groups))
    affected = D * len(hit)
    what = f"all {drawn} workers"
    if drawn < affected:
        what = f"{drawn} of {affected} workers (the dead and the peers that run most of their work)"
    notes = [f"the stages with deaths come first ({_ranges(hit)}): {what}"]
    if others:
        folded = D * len(others) - len(sample)
        how = f"pipeline {first} is drawn and {folded} workers are" if sample else f"all {folded} workers are"
        notes.append(f"of the other stages ({_ranges(others)}), {how} folded")
    if sample:
        groups.append([first * P + s for s in sample])
    return groups, notes


def _peers(chart: Chart, stage: int, room: int) -> list[int]:
    """The rows of a stage to draw, at most `room`: all if they fit, otherwise those of dead workers and of the workers
    with the most re-routed and redone ops, at least two."""
    rows = list(range(stage, len(chart.workers), chart.problem.stages))
    if len(rows) <= room:
        return rows
    extra = np.bincount(chart.row[(chart.marks & (REROUTED | REDONE)) != 0], minlength=len(chart.workers))
    best = sorted(rows, key=lambda row: (row not in chart.dead_from, -extra[row], row))
    tell = sum(row in chart.dead_from or extra[row] > 0 for row in rows)
    return sorted(best[: min(room, max(2, tell))])


def shown_pipelines(chart: Chart, most_rows: int) -> tuple[list[int], list[str]]:
    """Returns (pipelines, notes): the pipelines to draw in at most `most_rows` rows, and sentences about the omitted
    pipelines.

    Draws all pipelines if they fit, else one of each set of pipelines that look alike. If there are too many sets,
    those with deaths come first."""
    P, D = chart.problem.stages, chart.problem.pipelines
    room = max(1, most_rows // P)
    if room >= D:
        return list(range(D)), []
    groups = chart.alike()
    notes = [f"pipeline {g[0]} represents {len(g)} equal pipelines ({_ranges(g)})" for g in groups if len(g) > 1]
    hit = {r // P for r in chart.dead_from}
    kinds = sorted(groups, key=lambda g: (g[0] not in hit, g[0]))
    shown = sorted(g[0] for g in kinds[:room])
    left = sorted(d for g in kinds[room:] for d in g)
    notes = [n for n, g in zip(notes, (g for g in groups if len(g) > 1), strict=True) if g[0] in shown]
    if left:
        notes.append(f"{len(left)} of {D} pipelines are not shown ({_ranges(left)})")
    return shown, notes


def _ranges(numbers: Iterable[int]) -> str:
    """The sorted numbers as text, like "0-3, 5, 7-9"."""
    out: list[list[int]] = []
    for n in numbers:
        if out and n == out[-1][-1] + 1:
            out[-1][1:] = [n]
        else:
            out.append([n])
    return ", ".join("-".join(map(str, part)) for part in out)
