"""Schedules as figures for papers. The file's suffix selects svg, png or pdf.

    figure.save([chart], "plan.pdf")
    figure.save([fault_free, adapted], "both.svg")               # one above the other, with one time axis
    figure.save([fault_free, adapted], "both.svg", beside=True)

Text is stored as text, and fonts are embedded. Groups in the svg have the ids `<chart>-<kind>` (`0-F`, `1-W-rerouted`).

(Longer than other files because the charts, the strips with recovery phases, and the legend share one grid.)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import withStroke
from recycle_schedules import KINDS, OpKind

from recycle_pp.telemetry.words import plural

from . import palette, report
from .chart import CUT, LOST, REDONE, REROUTED, Chart, shown_rows
from .measures import Measures, period

STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 8,
    "axes.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "recycle_pp",  # constant ids, so equal charts give equal files
}
MOST_ROWS = 48
MOST_NUMBERS = 4000  # more numbers would not be readable
MARKS = {"": 0, "rerouted": REROUTED, "lost": LOST, "redone": REDONE, "cut": CUT}


def save(charts: Sequence[Chart], path: str | Path, *, beside: bool = False, width: float | None = None) -> list[str]:
    """Draws and writes the charts, in the format of the suffix (.svg, .png, .pdf). Returns sentences about omitted
    rows.

    beside  draws the charts side by side, not one above the other
    width   width of the figure in inches"""
    with matplotlib.rc_context(STYLE):
        figure, notes = draw(charts, beside=beside, width=width)
        suffix = Path(path).suffix.lstrip(".").lower()
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(suffix)
        figure.savefig(path, dpi=200, metadata=metadata)
    return notes


def draw(charts: Sequence[Chart], *, beside: bool = False, width: float | None = None) -> tuple[Figure, list[str]]:
    """Returns (figure, sentences about omitted rows). Arguments as for `save`."""
    picks, notes = [], []
    for chart in charts:
        groups, left_out = shown_rows(chart, MOST_ROWS)
        picks.append(groups)
        notes += [n for n in left_out if n not in notes]
    across = len(charts) if beside else 1
    width = width or (7.2 if not beside else 6.0 * across)
    rows = [sum(map(len, groups)) for groups in picks]
    row_height = 0.19 if max(rows) <= 48 else 9.0 / max(rows)
    heights = [max(r * row_height, 0.6) for r in rows]
    strips = [0.72 if c.recovery and c.recovery.phases else 0.0 for c in charts]
    # one grid: chart, strip, chart, strip, ... in inches, so that rows have the same height in every picture
    title, axis = 0.34, 0.38
    handles = _legend(charts)
    lines = max(1, -(-len(handles) // max(1, int((width - 0.2) / 0.78))))
    columns = max(1, -(-len(handles) // lines))
    legend = 0.1 + 0.16 * lines + 0.14 * len(notes)
    blocks = [title + h + axis + s for h, s in zip(heights, strips, strict=True)]
    height = (max(blocks) if beside else sum(blocks)) + legend
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    left, right, gap = 0.62, 0.12, 0.45
    panel = (width - left - right - (across - 1) * (left + gap - 0.3)) / across
    units = {c.unit for c in charts}
    span = max(c.span for c in charts) if len(units) == 1 else None
    top = height
    for i, (chart, groups, h, s) in enumerate(zip(charts, picks, heights, strips, strict=True)):
        x = left + (i * (panel + left + gap - 0.3) if beside else 0)
        y = top - title - h
        axes = figure.add_axes((x / width, y / height, panel / width, h / height), gid=f"chart-{i}")
        _panel(axes, chart, groups, span or chart.span, panel, h, i)
        if s:
            strip = figure.add_axes((x / width, (y - axis - s + 0.36) / height, panel / width, 0.2 / height))
            _phases(strip, chart)
        if not beside:
            top -= blocks[i]
    if any(str(drawn.get_gid()).endswith("-foot") for axes in figure.axes for drawn in axes.collections):
        for handle in handles:
            if handle.get_label() == "re-routed":
                handle.set_facecolor(palette.INK)
    figure.legend(
        handles=handles, loc="upper center", bbox_to_anchor=(0.5, (legend - 0.02) / height), ncols=columns,
        frameon=False, fontsize=7, handlelength=1.4, handleheight=0.9, columnspacing=1.2, handletextpad=0.5,
        borderaxespad=0,
    )  # fmt: skip
    for k, note in enumerate(notes):
        figure.text(left / width, (0.05 + 0.14 * (len(notes) - 1 - k)) / height, note, fontsize=6.5, style="italic")
    return figure, notes


def _panel(
    axes: Axes, chart: Chart, groups: list[list[int]], span: float, width: float, height: float, number: int
) -> None:
    line = {row: place for place, row in enumerate(row for group in groups for row in group)}  # row -> its place
    edges = np.concatenate([[0], np.cumsum([len(group) for group in groups])])
    axes.set_xlim(0, span * 1.002)
    axes.set_ylim(len(line), 0)
    for i in range(0, len(groups), 2):
        axes.axhspan(edges[i], edges[i + 1], color="#F3F4F6", zorder=0, lw=0)
    if chart.recovery:
        r = chart.recovery
        axes.axvspan(r.died, r.resumed, color=palette.STALL, zorder=0.5, lw=0, gid=f"{number}-stall")
        axes.axvline(r.died, color=palette.ALARM, lw=0.9, zorder=4, gid=f"{number}-death")
    _dead(axes, chart, line, span, number)
    _ops(axes, chart, line, width / span, height / len(line), number)
    _frame(axes, chart, groups, height / len(line), number)


def _frame(axes: Axes, chart: Chart, groups: list[list[int]], row_height: float, number: int) -> None:
    names = [chart.names[row] for group in groups for row in group]
    edges = np.cumsum([len(group) for group in groups])
    if row_height >= 0.09:
        axes.set_yticks(np.arange(len(names)) + 0.5, names, fontsize=min(7.0, row_height * 45))
    else:
        firsts = [chart.names[group[0]] for group in groups]
        axes.set_yticks(edges - [len(group) / 2 for group in groups], firsts, fontsize=5.5)
    axes.tick_params(axis="y", length=0, pad=2)
    axes.tick_params(axis="x", length=2.5, width=0.6, labelsize=7, pad=2)
    for edge in edges[:-1]:
        axes.axhline(edge, color="#9AA0AA", lw=0.5, zorder=1)
    if chart.unit == "slots" and chart.span <= 60:
        axes.set_xticks(np.arange(0, chart.span + 1e-9, 1), minor=True)
        axes.tick_params(axis="x", which="minor", length=1.5, width=0.4)
        axes.grid(axis="x", which="both", color="#DADDE3", lw=0.3, zorder=0.2)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_xlabel(f"time, {chart.unit}", fontsize=7, labelpad=1)
    m = Measures.of(chart)
    figures = [f"makespan {report.number(m.makespan)} {chart.unit}"]
    figures += [f"period {report.number(m.period)}"] if m.period is not None else []
    figures += [f"bubbles {m.idle:.0%}", f"peak in flight {max(m.peak):g}"]
    figures += [f"{m.between_hosts} tensors between hosts"] if m.between_hosts is not None else []
    if chart.recovery:
        figures += [
            f"stall {report.number(chart.recovery.stall)} {chart.unit}",
            f"redone {plural(m.redone, 'op')}",
        ]
    axes.set_title(chart.title, loc="left", fontsize=9, fontweight="bold", pad=5, gid=f"{number}-title")
    axes.set_title(" · ".join(figures), loc="right", fontsize=7, color="#4A505B", pad=5)


def _ops(axes: Axes, chart: Chart, line: dict[int, int], inch: float, row_height: float, number: int) -> None:
    """Draws the ops: one collection for each kind and mark, and the numbers of micro-batches if they fit.

    line        row -> its place from the top
    inch        inches per time unit
    row_height  inches
    number      number of the chart, for ids"""
    place = np.full(len(chart.workers), -1)
    place[list(line)] = list(line.values())
    y = place[chart.row]
    shown = y >= 0
    pad = 0.06 if row_height >= 0.1 else 0.0
    edge = 0.5 if len(chart) and row_height >= 0.1 and np.median(chart.end - chart.start) * inch > 0.03 else 0.0
    top_mark = np.select(
        [(chart.marks & bit) != 0 for bit in (CUT, REDONE, LOST, REROUTED)], (CUT, REDONE, LOST, REROUTED)
    )
    for k, kind in enumerate(KINDS):
        for name, mark in MARKS.items():
            pick = np.flatnonzero(shown & (chart.kind == k) & (top_mark == mark))
            if not len(pick):
                continue
            gid = f"{number}-{kind}" + (f"-{name}" if name else "")
            axes.add_collection(PolyCollection(_boxes(chart, pick, y, pad), gid=gid, **_look(kind, mark, edge)))
            if mark == REROUTED and not edge:  # too narrow for an outline, so the bottom edge is dark instead
                foot = _boxes(chart, pick, y + 0.62, 0.0, height=0.38 - pad)
                axes.add_collection(PolyCollection(foot, gid=f"{gid}-foot", facecolor=palette.INK, lw=0, zorder=3.4))
        if later := _next_step(chart):
            pick = np.flatnonzero(shown & (chart.kind == k) & (chart.start + later < chart.span))
            look: dict[str, Any] = {
                "facecolor": palette.FILL[kind],
                "edgecolor": palette.PAPER,
                "lw": edge,
                "alpha": 0.35,
            }
            axes.add_collection(PolyCollection(_boxes(chart, pick, y, pad, later), gid=f"{number}-{kind}-next", **look))
    text = [int(i) for i in np.flatnonzero(shown)]
    if row_height < 0.09 or len(text) > MOST_NUMBERS:
        return
    labels = {i: OpKind.OPTIMIZER if chart.microbatch[i] < 0 else str(chart.microbatch[i]) for i in text}
    room = (chart.end - chart.start) * inch * 72
    sizes = {i: min(7.0, row_height * 40, room[i] / (0.62 * len(label))) for i, label in labels.items()}
    if sum(size >= 3.5 for size in sizes.values()) < len(sizes) / 2:
        return  # the few ops with numbers would look like the only ops
    for i, label in labels.items():
        size = sizes[i]
        if size < 3.5:
            continue
        kind, marks = KINDS[chart.kind[i]], int(chart.marks[i])
        axes.text(
            (chart.start[i] + chart.end[i]) / 2, y[i] + 0.52, label, ha="center", va="center", fontsize=size, zorder=5,
            color=palette.ALARM if marks & CUT else palette.text_on(kind),
            fontweight="bold" if marks & (REROUTED | REDONE) else "normal", clip_on=True,
            path_effects=[withStroke(linewidth=1.6, foreground=palette.PAPER)] if marks & CUT else None,
        )  # fmt: skip


def _next_step(chart: Chart) -> float | None:
    """The period, if the next step starts before this one has ended on all workers."""
    steady = period(chart.plan)
    return steady if steady and steady < chart.span * (1 - 1e-9) else None


def _boxes(
    chart: Chart, ops: np.ndarray, y: np.ndarray, pad: float, later: float = 0.0, height: float = 1.0
) -> list[np.ndarray]:
    """Corners of the ops' rectangles, each of shape (4, 2)."""
    x0, x1, y0, y1 = chart.start[ops] + later, chart.end[ops] + later, y[ops] + pad, y[ops] + height - pad
    return list(np.stack([np.stack([a, b], -1) for a, b in ((x0, y0), (x1, y0), (x1, y1), (x0, y1))], 1))


def _look(kind: OpKind, mark: int, edge: float) -> dict[str, Any]:
    """Fill, outline and hatching of an op."""
    fill = palette.FILL[kind]
    if mark == CUT:
        return {"facecolor": palette.PAPER, "edgecolor": palette.ALARM, "hatch": "xxxx", "lw": 0.8, "zorder": 3.5}
    if mark == LOST:
        return {
            "facecolor": fill,
            "edgecolor": palette.ALARM,
            "lw": 0.8,
            "ls": (0, (2, 1)),
            "zorder": 3.2,
            "hatch": "////",
        }
    if mark == REDONE:
        return {"facecolor": fill, "edgecolor": palette.ALARM, "lw": 1.2, "zorder": 3.4}
    if mark == REROUTED:
        return {"facecolor": fill, "edgecolor": palette.INK, "lw": 1.0 if edge else 0.0, "zorder": 3.3}
    return {"facecolor": fill, "edgecolor": palette.PAPER, "lw": edge, "zorder": 3}


def _dead(axes: Axes, chart: Chart, line: dict[int, int], span: float, number: int) -> None:
    for row, since in chart.dead_from.items():
        if row in line:
            y = line[row]
            axes.add_patch(
                Rectangle((since, y + 0.06), span - since, 0.88, facecolor="none", edgecolor=palette.DEAD, lw=0,
                          hatch="/////", zorder=2, gid=f"{number}-dead-{chart.workers[row]}")
            )  # fmt: skip
            axes.text((since + span) / 2, y + 0.52, f"W({str(chart.workers[row]).replace('.', ',')}) dead", ha="center",
                      va="center", fontsize=6.5, zorder=2.5, color=palette.INK,
                      bbox={"facecolor": palette.PAPER, "edgecolor": "none", "pad": 1.0})  # fmt: skip


def _phases(axes: Axes, chart: Chart) -> None:
    """Draws the recovery, magnified: one segment per phase."""
    r = chart.recovery
    assert r is not None
    axes.set_xlim(0, max(r.stall, 1e-9))
    axes.set_ylim(0, 1)
    shades = ("#7A1230", "#B3123A", "#D4587A", "#E08CA3", "#EDB9C6", "#F6D5DC")
    for i, (name, begin, end) in enumerate(r.spans()):
        axes.axvspan(begin - r.died, end - r.died, color=shades[min(i, len(shades) - 1)], lw=0)
        if end - begin > 0.09 * r.stall:
            axes.text((begin + end) / 2 - r.died, 0.5, name, ha="center", va="center", fontsize=6,
                      color=palette.PAPER if i < 3 else palette.INK)  # fmt: skip
    words = ", ".join(f"{name} +{report.number(end - r.died)}" for name, _, end in r.spans())
    axes.set_title(words, loc="right", fontsize=6, color="#4A505B", pad=2)
    axes.set_yticks([0.5], ["stall"], fontsize=7)
    axes.tick_params(axis="y", length=0, pad=2)
    axes.tick_params(axis="x", length=2, width=0.5, labelsize=6, pad=1.5)
    axes.set_xlabel(f"{chart.unit} since the death", fontsize=6.5, labelpad=1)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _legend(charts: Sequence[Chart]) -> list[Patch]:
    """The entries of the legend: one for each kind of op and each mark in the charts."""
    kinds = sorted({int(k) for c in charts for k in np.unique(c.kind)})
    handles = [Patch(facecolor=palette.FILL[KINDS[k]], label=palette.NAMES[KINDS[k]], lw=0) for k in kinds]
    marks = int(np.bitwise_or.reduce(np.concatenate([c.marks for c in charts]), initial=0))
    for bit, words in (
        (REROUTED, "re-routed"),
        (CUT, "cut off"),
        (LOST, "lost"),
        (REDONE, "redone"),
    ):
        if marks & bit:
            look = {k: v for k, v in _look(OpKind.FORWARD, bit, 0.5).items() if k != "zorder"}
            look["facecolor"] = palette.PAPER
            handles.append(Patch(label=words, **look))
    if any(_next_step(c) for c in charts):
        handles.append(Patch(facecolor=palette.FILL[OpKind.FORWARD], alpha=0.35, label="next step", lw=0))
    if any(c.dead_from for c in charts):
        handles.append(Patch(facecolor="none", edgecolor=palette.DEAD, hatch="/////", lw=0, label="dead"))
    if any(c.recovery for c in charts):
        handles.append(Patch(facecolor=palette.STALL, label="stall", lw=0))
    return handles
