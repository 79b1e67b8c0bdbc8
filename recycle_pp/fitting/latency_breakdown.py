"""The latencies between the ops of a measured step.

between = breakdown_of(spans, after, barrier=True)
between.turns        # seconds between two ops of a worker, if the second one did not have to wait for its input
between.messages     # (from, to) -> seconds from the end of an op to the start of the op that waited for its output
between.sums         # stage -> seconds from the last gradient to the optimizer steps
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from recycle_schedules import KINDS, TensorKind, Worker
from recycle_schedules.op_kinds import B, F, I, O, W

Spans = Mapping[Worker, np.ndarray]  # tables of `packing.unpack`
_MAKES_GRADIENT = np.array([kind.makes is TensorKind.GRADIENT for kind in KINDS])
_COMPLETES_GRADIENT = np.array([kind.completes_gradient for kind in KINDS])


class LatencyBreakdown(NamedTuple):
    turns: np.ndarray
    messages: dict[tuple[Worker, Worker], np.ndarray]
    sums: dict[int, float]


class _Ops(NamedTuple):
    """A row for each op, sorted by worker and start."""

    owner: np.ndarray  # index into the list of workers
    stage: np.ndarray
    kind: np.ndarray
    pipeline: np.ndarray
    microbatch: np.ndarray
    start: np.ndarray
    end: np.ndarray


def breakdown_of(spans: Spans, after: Spans, barrier: bool) -> LatencyBreakdown:
    """The breakdown of a step without deaths.

    spans    spans of the step
    after    spans of the next step, which contain the optimizer steps of this step
    barrier  whether optimizer steps wait for the gradients of all stages; if so, `sums` start at the last gradient of
             any stage
    """
    workers = sorted(spans)
    ops = _ops(spans, workers, (F, I, W, B))
    arrived, sender = _inputs(ops, stages=1 + max(w.stage for w in workers))
    second = 1 + np.flatnonzero(ops.owner[1:] == ops.owner[:-1])  # ops that follow another op of their worker
    waited = arrived[second] > ops.end[second - 1]
    turned, got = second[~waited], second[waited]
    seconds = np.maximum(0.0, ops.start[got] - arrived[got])
    messages = _by_pair(workers, sender[got], ops.owner[got], seconds)
    return LatencyBreakdown(ops.start[turned] - ops.end[turned - 1], messages, _sums(ops, after, barrier))


def _ops(spans: Spans, workers: Sequence[Worker], kinds: Sequence[int]) -> _Ops:
    table = np.concatenate([spans[w] for w in workers])
    owner = np.repeat(np.arange(len(workers)), [len(spans[w]) for w in workers])
    chosen = np.isin(table[:, 0], kinds)
    table, owner = table[chosen], owner[chosen]
    order = np.lexsort((table[:, 3], owner))
    table, owner = table[order], owner[order]
    kind, pipeline, microbatch = table[:, :3].astype(int).T
    stage = np.array([w.stage for w in workers])[owner]
    return _Ops(owner, stage, kind, pipeline, microbatch, table[:, 3], table[:, 4])


def _inputs(ops: _Ops, stages: int) -> tuple[np.ndarray, np.ndarray]:
    """For each op, the time at which its input was complete and the index of the worker that computed it.

    The time is 0 if the op's input is not a boundary tensor.
    """
    forward, backward = ops.kind == F, _MAKES_GRADIENT[ops.kind]
    direction = backward.astype(int)
    shape = 2, 1 + ops.pipeline.max(initial=0), 1 + ops.microbatch.max(initial=0), stages
    made, maker = np.zeros(shape), np.zeros(shape, int)
    makes = forward | backward
    at = direction[makes], ops.pipeline[makes], ops.microbatch[makes], ops.stage[makes]
    made[at], maker[at] = ops.end[makes], ops.owner[makes]
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
    gradients = _COMPLETES_GRADIENT[ops.kind]
    np.maximum.at(ended, ops.stage[gradients], ops.end[gradients])
    if barrier:
        ended[:] = ended.max()
    steps = _ops(after, sorted(after), (O,))
    return {
        int(stage): max(0.0, float(np.median(steps.start[steps.stage == stage]) - ended[stage]))
        for stage in np.unique(steps.stage)
        if stage < len(ended)
    }
