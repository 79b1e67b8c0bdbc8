"""A schedule as a Chrome trace, for https://ui.perfetto.dev or chrome://tracing.

    perfetto.save([chart], "x.json")

A process a pipeline, a thread a stage, a flow from each op to the op that takes its tensor; deaths as instants and the
phases of a recovery as a process of their own. A slot is drawn as a millisecond. Several charts follow one another as
further processes. Format: "Trace Event Format" (Google), JSON object form.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from recycle_schedules import KINDS

from . import palette
from .chart import CUT, LOST, REDONE, REROUTED, Chart

MICROSECONDS = {"s": 1e6, "ms": 1e3, "us": 1.0, "slots": 1e3}
BITS = {"rerouted": REROUTED, "cut": CUT, "redone": REDONE, "lost": LOST}
Event = dict[str, Any]


def save(charts: Sequence[Chart], path: str | Path) -> None:
    """Written event by event: a million ops need no second copy in memory."""
    with open(path, "w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for i, event in enumerate(events(charts)):
            file.write((",\n" if i else "") + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")


def events(charts: Sequence[Chart]) -> Iterator[Event]:
    process, flow = 1, 0
    for chart in charts:
        yield from _names(chart, process)
        yield from _slices(chart, process)
        yield from _flows(chart, process, flow)
        yield from _recovery(chart, process)
        flow += len(chart.links[0])
        process += chart.problem.pipelines + 1


def _names(chart: Chart, process: int) -> Iterator[Event]:
    lead = f"{chart.title}: " if chart.title else ""
    for d in range(chart.problem.pipelines):
        about = {"ph": "M", "pid": process + d}
        yield about | {"name": "process_name", "args": {"name": f"{lead}pipeline {d}"}}
        yield about | {"name": "process_sort_index", "args": {"sort_index": process + d}}
        for s in range(chart.problem.stages):
            dead = " (dead)" if d * chart.problem.stages + s in chart.dead_from else ""
            yield about | {"tid": s + 1, "name": "thread_name", "args": {"name": f"W({d},{s}){dead}"}}
            yield about | {"tid": s + 1, "name": "thread_sort_index", "args": {"sort_index": s}}


def _slices(chart: Chart, process: int) -> Iterator[Event]:
    micro = MICROSECONDS.get(chart.unit, 1e3)
    columns = (chart.kind, chart.microbatch, chart.row, chart.start, chart.end, chart.marks)
    for op, (k, g, row, start, end, marks) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        args: Event = {"microbatch": g} if g >= 0 else {}
        args |= {name: True for name, bit in BITS.items() if marks & bit}
        yield {
            "ph": "X", "name": chart.name(op), "cat": ",".join([palette.NAMES[KINDS[k]], *(n for n in BITS if marks & BITS[n])]),
            **_place(chart, row, process), "ts": start * micro, "dur": (end - start) * micro, "args": args,
        }  # fmt: skip


def _flows(chart: Chart, process: int, first: int) -> Iterator[Event]:
    """A flow event belongs to the slice around it, so both ends lie just inside their ops."""
    micro = MICROSECONDS.get(chart.unit, 1e3)
    inside = (chart.end - chart.start) * 1e-3
    for i, (a, b) in enumerate(zip(*(x.tolist() for x in chart.links), strict=True), start=first):
        about = {"name": "gradient" if KINDS[chart.kind[a]] in "IB" else "activation", "cat": "send", "id": i}
        yield {"ph": "s", **about, **_place(chart, int(chart.row[a]), process), "ts": float(chart.end[a] - inside[a]) * micro}
        yield {"ph": "f", "bp": "e", **about, **_place(chart, int(chart.row[b]), process),
               "ts": float(chart.start[b] + inside[b]) * micro}  # fmt: skip


def _recovery(chart: Chart, process: int) -> Iterator[Event]:
    r, micro = chart.recovery, MICROSECONDS.get(chart.unit, 1e3)
    if not r:
        return
    place = {"pid": process + chart.problem.pipelines, "tid": 1}
    yield {"ph": "M", **place, "name": "process_name", "args": {"name": "recovery"}}
    for w in r.workers:
        row = w.pipeline * chart.problem.stages + w.stage
        yield {"ph": "i", "s": "g", "name": f"W({w.pipeline},{w.stage}) dies", **_place(chart, row, process), "ts": r.died * micro}
    for name, begin, end in r.spans():
        yield {"ph": "X", "name": name, "cat": "recovery", **place, "ts": begin * micro, "dur": (end - begin) * micro}


def _place(chart: Chart, row: int, process: int) -> Event:
    return {"pid": process + row // chart.problem.stages, "tid": row % chart.problem.stages + 1}
