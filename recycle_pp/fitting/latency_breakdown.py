"""What a step spends between its ops: turns on a worker, messages between workers, the sums at the end.

between = breakdown_of(spans, after, barrier=True)   # of one step, and of the next one, which holds its optimizer steps
between.turns        # seconds between two ops of a worker, where the second one's input had long been there
between.messages     # (from, to) -> seconds: from the end of an op to the start of the one that waited for its output
between.sums         # stage -> seconds from its last gradient (barrier: the last of all) to its optimizer steps
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from recycle_schedules import Worker

from recycle_pp.telemetry.packing import KINDS

Spans = Mapping[Worker, np.ndarray]  # as `packing.unpack` gives them
F, I, W, B, O = (KINDS.index(kind) for kind in "FIWBO")  # as everywhere in the field


class LatencyBreakdown(NamedTuple):
    turns: np.ndarray
    messages: dict[tuple[Worker, Worker], np.ndarray]
    sums: dict[int, float]


class _Ops(NamedTuple):
    """A row for each op, worker by worker in the order in which they ran."""

    who: np.ndarray  # position in the list of workers
    stage: np.ndarray
    kind: np.ndarray
    pipeline: np.ndarray
    microbatch: np.ndarray
    start: np.ndarray
    end: np.ndarray


def breakdown_of(spans: Spans, after: Spans, barrier: bool) -> LatencyBreakdown:
    """Where the time between ops went. spans: of a step in which nobody died; after: of the next one. barrier: no
    optimizer step begins before all stages' gradients are done."""
    workers = sorted(spans)
    ops = _ops(spans, workers, (F, I, W, B))
    arrived, sender = _inputs(ops, stages=1 + max(w.stage for w in workers))
    second = 1 + np.flatnonzero(ops.who[1:] == ops.who[:-1])  # ops that have one before them on their worker
    waited = arrived[second] > ops.end[second - 1]
    turned, got = second[~waited], second[waited]
    seconds = np.maximum(0.0, ops.start[got] - arrived[got])
    messages = _by_pair(workers, sender[got], ops.who[got], seconds)
    return LatencyBreakdown(ops.start[turned] - ops.end[turned - 1], messages, _sums(ops, after, barrier))


def _ops(spans: Spans, workers: Sequence[Worker], kinds: Sequence[int]) -> _Ops:
    table = np.concatenate([spans[w] for w in workers])
    who = np.repeat(np.arange(len(workers)), [len(spans[w]) for w in workers])
    chosen = np.isin(table[:, 0], kinds)
    table, who = table[chosen], who[chosen]
    order = np.lexsort((table[:, 3], who))
    table, who = table[order], who[order]
    kind, pipeline, microbatch = table[:, :3].astype(int).T
    stage = np.array([w.stage for w in workers])[who]
    return _Ops(who, stage, kind, pipeline, microbatch, table[:, 3], table[:, 4])


def _inputs(ops: _Ops, stages: int) -> tuple[np.ndarray, np.ndarray]:
    """For each op, when its boundary tensor was made and by whom (a position); a time of 0 where it takes none."""
    forward, backward = ops.kind == F, (ops.kind == I) | (ops.kind == B)
    direction = backward.astype(int)
    shape = 2, 1 + ops.pipeline.max(initial=0), 1 + ops.microbatch.max(initial=0), stages
    made, maker = np.zeros(shape), np.zeros(shape, int)
    makes = forward | backward
    at = direction[makes], ops.pipeline[makes], ops.microbatch[makes], ops.stage[makes]
    made[at], maker[at] = ops.end[makes], ops.who[makes]
    takes = (forward & (ops.stage > 0)) | (backward & (ops.stage < stages - 1))
    neighbour = np.where(takes, ops.stage + np.where(forward, -1, 1), 0)
    of = direction, ops.pipeline, ops.microbatch, neighbour
    return np.where(takes, made[of], 0.0), maker[of]


def _by_pair(
    workers: Sequence[Worker], sender: np.ndarray, receiver: np.ndarray, seconds: np.ndarray
) -> dict[tuple[Worker, Worker], np.ndarray]:
    pair = sender * len(workers) + receiver
    order = np.argsort(pair, kind="stable")
    pairs, firsts = np.unique(pair[order], return_index=True)
    parts = np.split(seconds[order], firsts[1:])
    return {(workers[p // len(workers)], workers[p % len(workers)]): s for p, s in zip(pairs, parts, strict=False)}


def _sums(ops: _Ops, after: Spans, barrier: bool) -> dict[int, float]:
    ended = np.zeros(1 + ops.stage.max(initial=0))
    gradients = (ops.kind == W) | (ops.kind == B)
    np.maximum.at(ended, ops.stage[gradients], ops.end[gradients])
    if barrier:
        ended[:] = ended.max()
    steps = _ops(after, sorted(after), (O,))
    return {
        int(stage): max(0.0, float(np.median(steps.start[steps.stage == stage]) - ended[stage]))
        for stage in np.unique(steps.stage)
        if stage < len(ended)
    }
