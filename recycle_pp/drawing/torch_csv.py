"""A schedule in the notation of torch.distributed.pipelining: a line a worker, its ops in order, `2F7`.

    torch_csv.save(chart, "x.csv")

The lines go pipeline by pipeline, stage by stage. With one pipeline this is what torch's schedules read
(`_load_csv(path, "compute_only")`); with several the micro-batch is the global one, so that re-routed ops keep their
name. A dead worker's line is empty. Optimizer steps have no name there and are left out.
"""

from __future__ import annotations

import csv
from pathlib import Path

from .chart import Chart, O


def save(chart: Chart, path: str | Path) -> None:
    with open(path, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(lines(chart))


def lines(chart: Chart) -> list[list[str]]:
    rows = (range(chart.first[r], chart.first[r + 1]) for r in range(len(chart.workers)))
    return [[chart.name(op) for op in row if chart.kind[op] != O] for row in rows]
