"""A schedule as a Chrome trace, for https://ui.perfetto.dev or chrome://tracing.

    perfetto.save([chart], "x.json")

A pipeline is a process, a stage a thread, and a boundary tensor a flow between two ops. Deaths are instants, and the
phases of a recovery are a separate process. A slot is drawn as a millisecond. If there are several charts, their
processes follow one another. Format: "Trace Event Format" (Google), JSON object form.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from recycle_schedules import KINDS

from . import palette
from .chart import CUT, LOST, REDONE, REROUTED, Chart, F

MICROSECONDS = {"ms": 1e3, "us": 1.0, "slots": 1e3}
BITS = {"rerouted": REROUTED, "cut": CUT, "redone": REDONE, "lost": LOST}
Event = dict[str, Any]


def save(charts: Sequence[Chart], path: str | Path) -> None:
    """Writes the trace event by event, so that a million ops need no second copy in memory."""
    with open(path, "w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
        for i, event in enumerate(events(charts)):
            file.write((",\n" if i else "") + encode(event))
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
    micro, P = MICROSECONDS.get(chart.unit, 1e3), chart.problem.stages
    columns = (
        chart.kind,
        chart.microbatch,
        chart.row,
        chart.start * micro,
        (chart.end - chart.start) * micro,
        chart.marks,
    )
    for k, g, row, start, length, marks in zip(*(c.tolist() for c in columns), strict=True):
        args: Event = {"microbatch": g} if g >= 0 else {}
        category = palette.NAMES[KINDS[k]]
        if marks:
            marked = [name for name, bit in BITS.items() if marks & bit]
            args |= dict.fromkeys(marked, True)
            category = ",".join([category, *marked])
        yield {
            "ph": "X", "name": f"{row % P}{KINDS[k]}{g if g >= 0 else ''}", "cat": category,
            "pid": process + row // P, "tid": row % P + 1, "ts": start, "dur": length, "args": args,
        }  # fmt: skip


def _flows(chart: Chart, process: int, first: int) -> Iterator[Event]:
    """Yields the flow events of the boundary tensors. A flow event belongs to the slice around it, so both ends are
    placed just inside their ops."""
    micro, P = MICROSECONDS.get(chart.unit, 1e3), chart.problem.stages
    a, b = chart.links
    inside = (chart.end - chart.start) * 1e-3
    columns = (
        chart.row[a],
        chart.row[b],
        (chart.end - inside)[a] * micro,
        (chart.start + inside)[b] * micro,
        chart.kind[b] == F,
    )
    rows = zip(*(c.tolist() for c in columns), strict=True)
    for i, (sender, receiver, sent, received, forward) in enumerate(rows, start=first):
        about = {"name": "activation" if forward else "gradient", "cat": "send", "id": i}
        yield {"ph": "s", **about, "pid": process + sender // P, "tid": sender % P + 1, "ts": sent}
        yield {"ph": "f", "bp": "e", **about, "pid": process + receiver // P, "tid": receiver % P + 1, "ts": received}


def _recovery(chart: Chart, process: int) -> Iterator[Event]:
    r, micro = chart.recovery, MICROSECONDS.get(chart.unit, 1e3)
    if not r:
        return
    place = {"pid": process + chart.problem.pipelines, "tid": 1}
    yield {"ph": "M", **place, "name": "process_name", "args": {"name": "recovery"}}
    for w in r.workers:
        yield {
            "ph": "i",
            "s": "g",
            "name": f"W({w.pipeline},{w.stage}) dies",
            "pid": process + w.pipeline,
            "tid": w.stage + 1,
            "ts": r.died * micro,
        }
    for name, begin, end in r.spans():
        yield {"ph": "X", "name": name, "cat": "recovery", **place, "ts": begin * micro, "dur": (end - begin) * micro}
