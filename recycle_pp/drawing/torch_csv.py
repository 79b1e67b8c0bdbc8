"""A schedule in the notation of torch.distributed.pipelining: one line per worker with its ops in order, `2F7`.

    torch_csv.save(chart, "x.csv")

Lines are ordered by pipeline, then stage. With one pipeline, torch's schedules can read the file (`_load_csv(path,
"compute_only")`). With several pipelines, micro-batches have global numbers, so that re-routed ops keep their names. A
dead worker's line is empty. Optimizer steps have no name in this notation and are omitted.
"""

from __future__ import annotations

import csv
from pathlib import Path

from recycle_schedules import KINDS
from recycle_schedules.op_kinds import O

from .chart import Chart


def save(chart: Chart, path: str | Path) -> None:
    with open(path, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(lines(chart))


def lines(chart: Chart) -> list[list[str]]:
    stage = chart.row % chart.problem.stages
    ops = [
        f"{s}{KINDS[k]}{g}"
        for s, k, g in zip(stage.tolist(), chart.kind.tolist(), chart.microbatch.tolist(), strict=True)
    ]
    keep = chart.kind != O
    return [
        [op for op, kept in zip(ops[part], keep[part], strict=True) if kept]
        for part in map(chart.ops_of, range(len(chart.workers)))
    ]
