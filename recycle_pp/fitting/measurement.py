"""Measures op and message times over several consecutive steps, for the profile.

    measurement = Measurement(barrier=True)
    measurement.add(spans)                       # a step's spans, as `packing.unpack` returns them
    times = measurement.times(again)             # times.ops["F"][stage], times.usual[worker]["F"], times.turn, ...

A worker whose ops take more than `FROM_THE_START` times as long as those of its peers is left out of the times of its
stage.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
from recycle_schedules import KINDS, OpKind, Worker
from recycle_schedules.op_kinds import COMPUTE, SPLIT

from recycle_pp.timing.packing import KINDS as SPANS
from recycle_pp.timing.packing import OWN

from .latency_breakdown import Spans, breakdown_of

FROM_THE_START = 1.6  # on shared busy cores, healthy workers take 0.87 to 1.1 times as long as their peers


class Times(NamedTuple):
    """The result, in seconds.

    ops       kind -> stage -> (median duration of an op) + `turn`; contains only the stages that ran an op of this kind
    usual     worker -> kind -> median duration of an op. Later steps of the worker are compared with it. It is the
              peers' median if the worker was much slower than its peers
    turn      median time between two ops of a worker, if the second one does not wait for its input
    messages  (from, to) -> the time of each message with a boundary tensor
    sums      stage -> median time from the last gradient to the optimizer steps
    """

    ops: dict[OpKind, dict[int, float]]
    usual: dict[Worker, dict[str, float]]
    turn: float
    messages: dict[tuple[Worker, Worker], np.ndarray]
    sums: dict[int, float]


class Measurement:
    """
    steps  number of measured steps; negative while steps are skipped
    """

    def __init__(self, barrier: bool, skipped: int = 0, warm: set[Worker] | None = None) -> None:
        """
        barrier  whether optimizer steps wait for the gradients of all stages
        skipped  number of steps to skip before the first measured one
        warm     workers that have run an F. The first F of any other worker is not measured; that worker is then added
                 to this set, which the caller may share with later measurements.
        """
        self.steps = -skipped
        self._warm = set() if warm is None else warm
        self._barrier = barrier
        self._before: Spans = {}
        self._ops: dict[Worker, dict[str, list[float]]] = {}
        self._turns: list[np.ndarray] = []
        self._messages: dict[tuple[Worker, Worker], list[np.ndarray]] = {}
        self._sums: dict[int, list[float]] = {}

    def add(self, spans: Spans) -> None:
        self.steps += 1
        if self.steps <= 0:
            return
        for worker, table in spans.items():
            here = self._ops.setdefault(worker, {})
            for kind in KINDS:
                ops = table[table[:, 0] == SPANS.index(kind)]
                if kind is OpKind.FORWARD and len(ops) and worker not in self._warm:
                    self._warm.add(worker)
                    ops = ops[1:]
                if len(ops):
                    here.setdefault(kind, []).extend(ops[:, OWN].tolist())
        if self._before:
            between = breakdown_of(self._before, spans, barrier=self._barrier)
            self._turns.append(between.turns)
            for pair, times in between.messages.items():
                self._messages.setdefault(pair, []).append(times)
            for stage, seconds in between.sums.items():
                self._sums.setdefault(stage, []).append(seconds)
        self._before = spans

    def times(self, again: Sequence[bool], slow: Collection[Worker] = ()) -> Times:
        """The times, with the time of recomputing subtracted.

        again  for each stage, whether it recomputed
        slow   workers to leave out
        """
        for worker, of in self._ops.items():
            if again[worker.stage] and OpKind.FORWARD in of:
                _subtract_recomputing(of)
        here = {w: {k: median_of(x) for k, x in of.items()} for w, of in self._ops.items() if w not in slow}
        peers = {w: _peers(here, w) for w in here}
        seconds: dict[OpKind, dict[int, list[float]]] = {kind: {} for kind in KINDS}
        for worker in here:
            if not _slower(here[worker], peers[worker]):
                for kind, of_kind in self._ops[worker].items():
                    seconds[OpKind(kind)].setdefault(worker.stage, []).extend(of_kind)
        turn = median_of(joined(self._turns))
        return Times(
            ops={kind: {s: median_of(x) + turn for s, x in stages.items()} for kind, stages in seconds.items()},
            usual={w: peers[w] if _slower(of, peers[w]) else of for w, of in here.items()},
            turn=turn,
            messages={pair: joined(parts) for pair, parts in self._messages.items()},
            sums={stage: median_of(x) for stage, x in self._sums.items()},
        )


def _subtract_recomputing(seconds: dict[str, list[float]]) -> None:
    """Subtracts the median `F`, which is the time of recomputing, from a worker's `I` and `B`, in place.

    seconds: kind -> durations of the worker's ops
    """
    forward = median_of(seconds[OpKind.FORWARD])
    for kind in COMPUTE:
        if kind.recomputes and kind in seconds:
            seconds[kind] = [max(x - forward, x / 3) for x in seconds[kind]]


def _peers(here: Mapping[Worker, Mapping[str, float]], worker: Worker) -> dict[str, float]:
    """Kind -> the median of its durations on the peers of this worker.

    here: worker -> kind -> duration
    """
    others = [of for w, of in here.items() if w.stage == worker.stage and w != worker]
    return {kind: median_of([of[kind] for of in others if kind in of]) for kind in {k for of in others for k in of}}


def _slower(of: Mapping[str, float], peers: Mapping[str, float]) -> bool:
    kinds = [kind for kind in SPLIT if kind in of and kind in peers]
    return sum(of[k] for k in kinds) > FROM_THE_START * sum(peers[k] for k in kinds)


def joined(parts: Collection[np.ndarray]) -> np.ndarray:
    return np.concatenate([*parts, np.empty(0)])


def median_of(values: Sequence[float] | np.ndarray) -> float:
    """The median; 0 without values. Python's median is ten times as fast for few values, numpy's for many."""
    if len(values) > 100:
        return float(np.median(values))
    return float(median(values)) if len(values) else 0.0
