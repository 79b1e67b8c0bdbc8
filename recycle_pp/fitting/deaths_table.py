"""The table of `plan --what-if`, with one row for each worker that could die next.

    show_deaths(console, source, seconds=None)

If the source contains trainer settings and schedule.rebalance is not `never`, each row also shows whether the trainer
would move layers after this death (`trainer_moves.py`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from recycle_schedules import Worker
from recycle_schedules.analysis.what_if import Row, Table, what_if
from rich.console import Console
from rich.table import Table as Grid

from recycle_pp.config.settings import Settings
from recycle_pp.config.sizes import format_size

from .problem_source import Source
from .trainer_moves import Decision, decisions

SECONDS = 0.1  # seconds of search for each plan


def show_deaths(
    console: Console,
    source: Source,
    seconds: float | None,
    size: float | None = None,
    capacity: float | None = None,
    as_json: bool = False,
) -> None:
    """Prints the table, or JSON.

    seconds   search time for each plan, limited to `SECONDS`; None: `SECONDS`
    size      bytes of a micro-batch in flight
    capacity  bytes that a worker has available for micro-batches in flight
    """
    terminal = sys.stderr.isatty()

    def progress(done: int, total: int) -> None:
        if terminal:
            print(f"\r{done} of {total} ", end="" if done < total else "\n", file=sys.stderr)

    seconds = SECONDS if seconds is None else min(SECONDS, seconds)
    table = what_if(source.problem, seconds=seconds, microbatch_bytes=size, capacity=capacity, progress=progress)
    settings, made = _trainer(source)
    table = replace(table, rows=[_with_decision(row, made, table.now.value) for row in table.rows])
    if as_json:
        print(json.dumps(_deaths_as_json(table, source.unit, made), indent=1))
        return
    console.print(_grid(table, capacity, made))
    if settings is not None:
        mode, outage = settings.schedule.rebalance, settings.schedule.outage
        console.print(f"schedule.rebalance={mode}, for an outage of schedule.outage={outage:g} s", highlight=False)
    left = f"{table.left} of {source.problem.pipelines} workers alive"
    console.print(
        f"now {table.now.value:g} {source.unit} per step; stage {table.thinnest} has the least redundancy left: {left}"
    )


def _trainer(source: Source) -> tuple[Settings | None, dict[Worker, Decision]]:
    """The settings of the trainer and its decision after each death.

    Returns None and {} if the trainer never moves layers or if the times of the problem are not in seconds.
    """
    settings = source.settings
    if settings is None and source.run is not None:
        settings = source.run.folder.read_settings()
    if settings is None or source.layout is None or source.unit != "s":
        return None, {}
    if not settings.model.own or settings.schedule.rebalance == "never":
        return None, {}
    return settings, decisions(source.problem, settings, source.layout)


def _with_decision(row: Row, made: Mapping[Worker, Decision], now: float) -> Row:
    """The row with the best layout that the trainer found for this death. now: the current period."""
    if (of := made.get(row.worker)) is None:
        return row
    return replace(row, moved=of.found.then, moved_slowdown=of.found.then / now - 1, layout=of.found.layout)


def _deaths_as_json(table: Table, unit: str, made: Mapping[Worker, Decision]) -> dict[str, Any]:
    rows = [
        {
            "worker": str(row.worker),
            "period": row.period,
            "slowdown": row.slowdown,
            "fullest_peer": None if row.peer is None else str(row.peer),
            "in_flight": row.peak,
            "limit": None if row.limit == float("inf") else row.limit,
            "bytes": row.bytes,
            "fits": row.fits,
            "moved_period": row.moved,
            "moved_slowdown": row.moved_slowdown,
            "layout": row.layout,
            **_decision_as_json(made.get(row.worker)),
        }
        for row in table.rows
    ]
    now = {"time_unit": unit, "period": table.now.value, "thinnest_stage": table.thinnest, "left": table.left}
    return now | {"deaths": rows}


def _decision_as_json(decision: Decision | None) -> dict[str, Any]:
    """The keys of the JSON row for this decision; {} for None, which means that no layout is better."""
    if decision is None:
        return {}
    move = decision.move
    return {"trainer_moves": decision.moves, "gain_seconds": move.gain, "cost_seconds": move.cost}


def _grid(table: Table, capacity: float | None, made: Mapping[Worker, Decision]) -> Grid:
    grid = Grid(box=None, padding=(0, 2, 0, 0))
    layers = table.now.layout is not None or bool(made)
    names = ["dies next", "period", "slowdown", *(["moved", "slowdown"] if layers else [])]
    last = [*(["layers moved"] if layers else []), *(["the trainer"] if made else [])]
    for name in (*names, "fullest peer", "in flight", "limit", "size", "fits", *last):
        grid.add_column(name, justify="left" if name in ("dies next", "fits", *last) else "right")
    for row in table.rows:
        if row.period is None:
            alone = len(table.now.problem.live[row.worker.stage]) == 1
            reason = "its stage is lost" if alone else "its peers have no room"
            grid.add_row(str(row.worker), "none", *["-"] * (len(names) + 2), f"no: {reason}")
            continue
        size = (
            "-" if row.bytes is None else format_size(row.bytes) + (f" of {format_size(capacity)}" if capacity else "")
        )
        cells = (
            f"{row.period:g}",
            f"{100 * (row.slowdown or 0):+z.1f} %",
            *(_moved(row) if layers else []),
            str(row.peer),
            f"{row.peak:g}",
            f"{row.limit:g}",
        )
        ends = [" ".join(map(str, row.layout or "-"))] if layers else []
        ends += [_decision_in_words(made.get(row.worker))] if made else []
        grid.add_row(str(row.worker), *cells, size, "yes" if row.fits else "no", *ends)
    return grid


def _moved(row: Row) -> tuple[str, str]:
    return ("-", "-") if row.moved is None else (f"{row.moved:g}", f"{100 * (row.moved_slowdown or 0):+z.1f} %")


def _decision_in_words(decision: Decision | None) -> str:
    if decision is None:
        return "re-routes"
    move = decision.move
    does = "moves layers" if decision.moves else "re-routes"
    return f"{does}: gain {move.gain:.3g} s, cost {move.cost:.2g} s"
