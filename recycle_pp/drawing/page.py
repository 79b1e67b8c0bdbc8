"""Schedules as one self-contained html page: it needs no network, shows up to a million ops, and can zoom and pan.

    page.save([Step("plan", [chart])], "x.html")
    page.save([Step("step 19", [before]), Step("step 20", [planned, trace])], "run.html", title="runs/demo", first=1)

Charts of a step are shown one above the other. The ops are stored as deflated typed arrays (about 3 bytes per op) and
unpacked when their step is first shown. `page/` contains the drawing code. The page also has its content as text,
supports the keyboard, and never interprets a name from a file as markup.
"""

from __future__ import annotations

import base64
import html
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from recycle_schedules import KINDS

from . import palette, report
from .chart import CUT, LOST, REDONE, REROUTED, Chart, shown_rows

SCRIPTS = ("chart.js", "paint.js", "pixels.js", "frame.js", "main.js", "controls.js")
MOST_ROWS = 48  # in the initial view; the key `f` shows all rows
Json = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """A position of the page's slider.

    name       label of the position
    charts     charts to compare, one above the other
    note       a sentence about the step
    baselines  further plans for the table of figures"""

    name: str
    charts: Sequence[Chart]
    note: str = ""
    baselines: report.Baselines = ()


def save(steps: Iterable[Step], path: str | Path, *, title: str = "", first: int = 0) -> None:
    """Writes the page, which opens at `steps[first]`."""
    Path(path).write_text(render(steps, title=title, first=first), encoding="utf-8")


def render(steps: Iterable[Step], *, title: str = "", first: int = 0) -> str:
    described: list[Json] = []
    blocks: list[str] = []
    legend: set[str] = set()
    for step in steps:
        metas = []
        for chart in step.charts:
            name = f"ops-{len(blocks)}"
            blocks.append(f'<script id="{name}" type="text/plain">{_packed(chart)}</script>')
            metas.append(_meta(chart, name))
            legend |= _used(chart)
        story = [sentence for chart in step.charts for sentence in report.recovery(chart)]
        figures = report.figures(step.charts, step.baselines)
        described.append({"name": step.name, "note": step.note, "charts": metas, "figures": figures, "story": story})
    job = {
        "title": title or "recycle_pp schedule", "first": first, "steps": described, "legend": sorted(legend),
        "kinds": [{"letter": kind, "step": kind.makes.step if kind.makes else 0} for kind in KINDS],
        "fill": palette.FILL, "names": palette.NAMES, "text": {k: palette.text_on(k) for k in KINDS},
    }  # fmt: skip
    source = files(__package__) / "page"
    return Template((source / "page.html").read_text()).substitute(
        title=html.escape(str(job["title"])),
        style=(source / "page.css").read_text(),
        job=json.dumps(job).replace("<", "\\u003c"),
        data="\n".join(blocks),
        script="\n".join((source / name).read_text() for name in SCRIPTS),
    )


def _packed(chart: Chart) -> str:
    """The chart's arrays, concatenated, compressed by zlib and encoded in base64. Arrays with wider elements come
    first, so that each array is aligned."""
    parts = (
        chart.first.astype("<u4"), chart.microbatch.astype("<i4"), chart.start.astype("<f4"), chart.end.astype("<f4"),
        chart.kind.astype("u1"), chart.marks.astype("u1"),
    )  # fmt: skip
    return base64.b64encode(zlib.compress(b"".join(p.tobytes() for p in parts), 6)).decode()


def _meta(chart: Chart, data: str) -> Json:
    r = chart.recovery
    groups, folded = shown_rows(chart, MOST_ROWS)
    return {
        "data": data,
        "groups": groups if folded else None,
        "folded": folded,
        "title": chart.title,
        "unit": chart.unit,
        "ops": len(chart),
        "pipelines": chart.problem.pipelines,
        "stages": chart.problem.stages,
        "counts": list(chart.problem.counts),
        "span": chart.span,
        "dead": sorted(chart.dead_from.items()),
        "recovery": {"died": r.died, "resumed": r.resumed, "spans": r.spans()} if r else None,
    }


def _used(chart: Chart) -> set[str]:
    """The names of everything that the legend must explain."""
    marks = int(np.bitwise_or.reduce(chart.marks, initial=0))
    names = {"rerouted": REROUTED, "cut": CUT, "lost": LOST, "redone": REDONE}
    out = {KINDS[int(k)] for k in np.unique(chart.kind)} | {name for name, bit in names.items() if marks & bit}
    return out | ({"dead"} if chart.dead_from else set()) | ({"stall"} if chart.recovery else set())
