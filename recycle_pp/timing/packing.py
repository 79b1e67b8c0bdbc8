"""Packs the spans of a step (the times at which a worker ran its ops) into bytes. All workers send their spans at the
same time, while the job waits for the coordinator.

data = pack(spans)                  # [[kind, pipeline, index, start, end, own], ...]
table = unpack(data, later=0.5)     # float64 (n, 6); kind: position in KINDS; start and end increased by 0.5 s
spans = listed(table)               # [[kind, pipeline, index, start, end], ...]

own: seconds of the span in which the thread had a core (`execution.spans`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from recycle_schedules import KINDS as OP_KINDS

from recycle_pp.wire.messages.activity import REDUCTION

KINDS = (*OP_KINDS, REDUCTION)
"""Kinds of spans: the kinds of ops, and a worker's part of the gradient sum over its stage."""

Span = tuple[str, int, int, float, float, float]
"""kind, pipeline, index, start, end, own; the last three in seconds, start and end on the worker's monotonic clock"""

START, END, OWN = 3, 4, 5  # indices of the table's columns

_ROW = np.dtype("<f8")  # also used for the integers of a span, which float64 represents exactly


def pack(spans: Iterable[Any]) -> bytes:
    return table_of(spans).tobytes()


def table_of(spans: Iterable[Any]) -> np.ndarray:
    """The table of the spans, (n, 6). A span without `own`, such as one from `listed`, gets its whole duration as
    `own`."""
    rows = [(KINDS.index(k), d, i, start, end, *(own or [end - start])) for k, d, i, start, end, *own in spans]
    return np.array(rows, _ROW).reshape(-1, 6)


def unpack(data: bytes, later: float = 0.0) -> np.ndarray:
    table = np.frombuffer(data, _ROW).reshape(-1, 6).copy()
    table[:, START:OWN] += later
    return table


def listed(table: np.ndarray) -> list[list[Any]]:
    kinds, pipelines, indices = table[:, :3].astype(int).T.tolist()
    starts, ends = table[:, START:OWN].T.tolist()
    return [list(row) for row in zip([KINDS[k] for k in kinds], pipelines, indices, starts, ends, strict=True)]
