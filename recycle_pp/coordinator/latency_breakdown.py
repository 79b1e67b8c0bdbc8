"""What a step spends between its ops: turns on a worker, messages between workers, the sums at the end.

between = breakdown_of(spans, after, barrier=True)   # of one step, and of the next one, which holds its optimizer steps
between.turns        # seconds between two ops of a worker, where the second one's input had long been there
between.messages     # (from, to, seconds): from the end of an op to the start of the one that waited for its output
between.sums         # stage -> seconds from its last gradient (barrier: the last of all) to its optimizer steps
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from recycle_schedules import Tensor, Worker

from recycle_pp.protocol.ledger import consumed_by, made_by

Spans = Mapping[Worker, list[Any]]  # [kind, pipeline, index, start, end], seconds of one clock


class Message(NamedTuple):
    sender: Worker
    receiver: Worker
    seconds: float


class LatencyBreakdown(NamedTuple):
    turns: list[float]
    messages: list[Message]
    sums: dict[int, float]


def breakdown_of(spans: Spans, after: Spans, barrier: bool) -> LatencyBreakdown:
    """Where the time between ops went. spans: of a step in which nobody died; after: of the next one. barrier: no
    optimizer step begins before all stages' gradients are done."""
    turns: list[float] = []
    messages: list[Message] = []
    stages = 1 + max(w.stage for w in spans)
    compute = {w: sorted((s for s in of if s[0] in "FIWB"), key=lambda s: s[3]) for w, of in spans.items()}
    made: dict[Tensor | None, tuple[float, Worker]] = {}
    for worker, of in compute.items():
        for kind, d, i, _, end in of:
            made[made_by(kind, (d, i), worker.stage, stages)] = end, worker
    for worker, of in compute.items():
        for before, (kind, d, i, start, _) in pairwise(of):
            takes = consumed_by(kind, (d, i), worker.stage, stages)
            arrived, sender = made.get(takes, (0.0, worker)) if takes else (0.0, worker)
            if arrived > before[4]:
                messages.append(Message(sender, worker, max(0.0, start - arrived)))
            else:
                turns.append(start - before[4])
    return LatencyBreakdown(turns, messages, _sums(compute, after, barrier))


def _sums(compute: Spans, after: Spans, barrier: bool) -> dict[int, float]:
    ended: dict[int, float] = {}
    for worker, of in compute.items():
        last = max((s[4] for s in of if s[0] in "WB"), default=0.0)
        ended[worker.stage] = max(ended.get(worker.stage, 0.0), last)
    if barrier:
        ended = dict.fromkeys(ended, max(ended.values()))
    stepped: dict[int, list[float]] = {}
    for worker, of in after.items():
        stepped.setdefault(worker.stage, []).extend(s[3] for s in of if s[0] == "O")
    return {s: max(0.0, median(starts) - ended[s]) for s, starts in stepped.items() if starts and s in ended}
