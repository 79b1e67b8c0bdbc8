"""A Gantt chart in the terminal: one row per worker, with letters in addition to colours.

    terminal.show([chart], Console())                     # with the figures under it
    terminal.show([fault_free, adapted], Console(), window=(0, 40), most_rows=1000)

F I W B O are the ops. A lower-case letter is an op that runs outside its own pipeline. The number is the global
micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from recycle_schedules import KINDS, Trace
from rich.console import Console
from rich.text import Text

from . import palette, report
from .chart import CUT, LOST, REDONE, REROUTED, Chart, shown_rows

LABEL = 6  # columns of "12.15 "
MOST_FOLDS = 4  # a plan wider than this many terminals is drawn coarsely
WIDEST_SLOT = 4  # columns; wider slots would only stretch the chart


@dataclass(frozen=True)
class Scale:
    """A time axis from `begin`, with `step` time units per column, in `folds` lines of `width` columns each."""

    begin: float
    step: float
    width: int
    folds: int
    exact: bool  # whether ops are drawn as letters; otherwise columns show the load of a worker

    @classmethod
    def of(cls, charts: Sequence[Chart], room: int, window: tuple[float, float] | None) -> Scale:
        begin, end = window or (0.0, max(c.span for c in charts))
        length = max(end - begin, 1e-9)
        lengths = np.concatenate([c.end - c.start for c in charts])
        lengths = np.append(lengths[lengths > 1e-9], length)
        measured = any(isinstance(c.plan, Trace) for c in charts)
        # the median of measured lengths, because a few short ops must not stretch the rest
        shortest = float(np.median(lengths) if measured else lengths.min())
        # whole columns per slot if slots are whole, so that all ops of a kind have the same width
        whole = all(np.all(np.mod(np.concatenate([c.start, c.end]) / shortest, 1) < 1e-9) for c in charts)
        fit = room * shortest / length  # columns of the shortest op
        if fit >= 1:
            columns = min(float(np.floor(fit)) if whole else fit, WIDEST_SLOT)
            step = shortest / columns
            return cls(begin, step, int(np.ceil(length / step - 1e-9)), 1, True)
        folds = int(np.ceil(1 / fit))
        if folds <= MOST_FOLDS:
            return cls(begin, shortest, room, folds, True)
        return cls(begin, length / room, room, 1, False)

    def times(self, fold: int) -> np.ndarray:
        """The centres of a fold's columns. Shape (width,)."""
        return self.begin + self.step * (fold * self.width + np.arange(self.width) + 0.5)


def show(
    charts: Sequence[Chart],
    console: Console,
    *,
    window: tuple[float, float] | None = None,
    most_rows: int = 48,
    baselines: report.Baselines = (),
) -> None:
    """Prints the charts, a legend, the figures, and sentences about omitted rows. Charts of one unit share a scale."""
    room = max(console.width - LABEL, 8)
    scales = {unit: Scale.of([c for c in charts if c.unit == unit], room, window) for unit in {c.unit for c in charts}}
    notes: list[str] = []
    for chart in charts:
        scale = scales[chart.unit]
        groups, left_out = shown_rows(chart, most_rows)
        notes += [note for note in left_out if note not in notes]
        if chart.title:
            console.print(Text(chart.title, "bold"))
        for fold in range(scale.folds):
            for line in _fold(chart, scale, fold, groups, console):
                console.print(line, no_wrap=True, crop=True, soft_wrap=False)
    console.print(_legend(charts, console))
    for unit, scale in scales.items():
        notes += _cut_notes([c for c in charts if c.unit == unit], scale, window)
    for note in notes:
        console.print(Text(note, "italic"))
    console.print()
    console.print(report.table(charts, baselines))
    for chart in charts:
        for sentence in report.recovery(chart):
            console.print(Text(sentence))


def _fold(chart: Chart, scale: Scale, fold: int, groups: list[list[int]], console: Console) -> list[Text]:
    """The lines of one fold (an interval of the time axis): axis, rows, and a blank line between groups."""
    lines = [_axis(chart, scale, fold)]
    for i, group in enumerate(groups):
        if i and chart.problem.stages > 1:
            lines.append(Text())
        lines += [_row(chart, row, scale, fold, console) for row in group]
    return lines


def _axis(chart: Chart, scale: Scale, fold: int) -> Text:
    first = scale.begin + scale.step * scale.width * fold
    apart = _round_up(scale.step * 8)
    marks = [" "] * (scale.width + 12)
    t = abs(np.ceil(first / apart - 1e-9)) * apart  # abs: avoids -0
    while t < first + scale.step * scale.width:
        at = round((t - first) / scale.step)
        text = f"{t:g}" + (f" {chart.unit}" if t == 0 or (fold and t - first < apart) else "")
        if at + len(text) < len(marks):
            marks[at : at + len(text)] = text
        t = round(t + apart, 9)
    return Text(" " * LABEL + "".join(marks[: scale.width]).rstrip(), "dim")


def _round_up(x: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... that is at least x."""
    power = 10 ** np.floor(np.log10(x))
    return float(next(m * power for m in (1, 2, 5, 10) if m * power >= x * (1 - 1e-9)))


def _row(chart: Chart, row: int, scale: Scale, fold: int, console: Console) -> Text:
    """One worker's line. A column shows the op at its centre, and adjacent columns of one op are one cell."""
    ops, times = chart.ops_of(row), scale.times(fold)
    colour, plain = console.color_system is not None, not console.options.ascii_only
    line = Text(f"{chart.workers[row]!s:<{LABEL}}", "bold" if row in chart.dead_from else "")
    shares = None
    if scale.exact:
        at = np.searchsorted(chart.start[ops], times, side="right") - 1 + ops.start
        at = np.where((at >= ops.start) & (times < np.append(chart.end, 0.0)[at]), at, -1)
    else:  # a column shows its own load
        shares = _shares(chart, ops, scale)
        at = np.where(shares.any(axis=1), np.arange(scale.width), -1)
    state = np.where(at >= 0, at, [-2 - _gap(chart, row, t) for t in times])  # one number per column: op or kind of gap
    edges = [0, *(np.flatnonzero(np.diff(state)) + 1), len(state)]
    for a, b in pairwise(edges):
        width, what = int(b - a), int(state[a])
        if what < 0:
            line.append(*_gap_cell(-2 - what, width, plain))
        elif shares is not None:
            line.append(*_coarse_cell(shares[a], colour, plain))
        else:
            line.append(_cell(chart, what, width, colour), _style(chart, what) if colour else "")
    return line


def _shares(chart: Chart, ops: slice, scale: Scale) -> np.ndarray:
    """The share of each kind in each column and, last, of re-routed ops. Shape (columns, kinds + 1)."""
    edges = scale.begin + scale.step * np.arange(scale.width + 1)
    out = np.zeros((scale.width, len(KINDS) + 1))
    for k in range(len(KINDS) + 1):
        pick = chart.kind[ops] == k if k < len(KINDS) else (chart.marks[ops] & REROUTED) != 0
        start, end = chart.start[ops][pick], chart.end[ops][pick]
        if len(start):  # time taken before each edge: complete ops, and part of the current one
            done = np.concatenate([[0.0], np.cumsum(end - start)])
            begun = np.searchsorted(start, edges, side="right")
            part = np.maximum(np.append(end, 0.0)[begun - 1] - edges, 0.0) * (begun > 0)
            out[:, k] = np.diff(done[begun] - part) / scale.step
    return np.clip(np.where(out < 1e-6, 0.0, out), 0.0, 1.0)  # removes rounding errors of the differences


def _coarse_cell(shares: np.ndarray, colour: bool, unicode: bool) -> tuple[str, str]:
    """Returns (character, style) of a column: its load as the height of a block (or as a digit), in the mixed colour of
    its ops. The character is `r` if most of the load is re-routed."""
    busy = float(shares[:-1].sum())
    mixed = "r" if shares[-1] > busy / 2 > 0 else ""
    block = mixed or ("▁▂▃▄▅▆▇█"[min(7, int(busy * 8))] if unicode else str(min(9, int(busy * 10))))
    if not colour:
        return block, ""
    fills = np.array([[int(palette.FILL[k][i : i + 2], 16) for i in (1, 3, 5)] for k in KINDS])
    r, g, b = (shares[:-1] @ fills / max(busy, 1e-9)).round().astype(int).tolist()
    return block, f"{palette.INK} on rgb({r},{g},{b})" if mixed else f"rgb({r},{g},{b})"


IDLE, DEAD, STALL, OUTSIDE = range(4)


def _gap(chart: Chart, row: int, t: float) -> int:
    if t >= chart.dead_from.get(row, np.inf):
        return DEAD
    if t > chart.span:
        return OUTSIDE
    r = chart.recovery
    return STALL if r and r.died <= t < r.resumed else IDLE


def _gap_cell(what: int, width: int, unicode: bool) -> tuple[str, str]:
    if what == DEAD:
        hatch = ("╱" if unicode else "/") * width
        side = (width - 6) // 2
        return (hatch[:side] + " dead " + hatch[: width - 6 - side] if side >= 2 else hatch), "dim"
    if what == STALL:
        return ":" * width, f"{palette.ALARM}"
    dot = "·" if unicode else "."
    return (" " if what == OUTSIDE else dot) * width, "dim"


def _cell(chart: Chart, op: int, width: int, colour: bool) -> str:
    """The text of a cell: letter and number of the op. Without colour, the cell is filled to show the op's length."""
    marks, microbatch = int(chart.marks[op]), int(chart.microbatch[op])
    kind = KINDS[chart.kind[op]]
    letter = kind.lower() if marks & REROUTED else str(kind)
    signs = [sign for bit, sign in ((CUT, "!"), (LOST, "~"), (REDONE, "+")) if marks & bit]
    fill = [*signs, " " if colour else "-"][0]
    number = "" if microbatch < 0 else str(microbatch)
    text = letter + number
    if len(text) > width:
        text = letter if not colour or len(number) > width else number
    if width == 1 and fill in "!~":
        return fill
    return text.ljust(width, fill)


def _style(chart: Chart, op: int) -> str:
    kind, marks = KINDS[chart.kind[op]], int(chart.marks[op])
    if marks & CUT:
        return f"bold {palette.PAPER} on {palette.ALARM}"
    style = f"{palette.text_on(kind)} on {palette.FILL[kind]}"
    if marks & LOST:
        return f"strike {style}"
    return f"bold underline {style}" if marks & (REROUTED | REDONE) else style


def _legend(charts: Sequence[Chart], console: Console) -> Text:
    """The legend: an entry for each kind of op and each mark in the charts."""
    kinds = sorted({int(k) for c in charts for k in np.unique(c.kind)})
    marks = int(np.bitwise_or.reduce(np.concatenate([c.marks for c in charts]), initial=0))
    colour = console.color_system is not None
    entries = []
    for k in kinds:
        name = KINDS[k]
        entry = Text(f" {name} ", f"{palette.text_on(name)} on {palette.FILL[name]}" if colour else "")
        entries.append(entry.append(f" {palette.NAMES[name]} ", ""))
    for bit, sign, words in (
        (REROUTED, "small letter" + (", underlined" if colour else ""), "re-routed"),
        (CUT, "!", "cut off by the death"),
        (LOST, "~", "lost with its worker"),
        (REDONE, "+", "redone"),
    ):
        if marks & bit:
            entries.append(Text(f" {sign}: {words} "))
    if not colour and any((c.end - c.start).size for c in charts):
        entries.append(Text(" -: fills an op to its length "))
    if any(c.dead_from for c in charts):
        entries.append(Text(" ╱: dead " if not console.options.ascii_only else " /: dead "))
    if any(c.recovery for c in charts):
        entries.append(Text(" :: stall "))
    return _lines_of(entries, console.width)


def _lines_of(entries: Sequence[Text], width: int) -> Text:
    """The entries side by side. Line breaks are only between entries."""
    text, used = Text(), 0
    for entry in entries:
        if used and used + entry.cell_len > width:
            text.append("\n")
            used = 0
        text.append_text(entry)
        used += entry.cell_len
    return text


def _cut_notes(charts: Sequence[Chart], scale: Scale, window: tuple[float, float] | None) -> list[str]:
    unit = charts[0].unit
    notes = []
    if not scale.exact:
        notes.append(
            f"one column is {scale.step:.3g} {unit}; the height of a block shows how busy the worker is, r: re-routed; "
            "use --from and --to for a closer look, or --out x.html to zoom"
        )
    longest = max(c.span for c in charts)
    if window and (window[0] > 0 or window[1] < longest):
        notes.append(f"the chart shows {window[0]:g} to {window[1]:g} of {longest:.6g} {unit}")
    missed = sum(int((c.end - c.start < scale.step / 2).sum()) for c in charts) if scale.exact else 0
    if missed:
        notes.append(f"{missed} ops are shorter than half a column of {scale.step:.3g} {unit} and may not show")
    if scale.folds > 1:
        notes.append(f"the chart is folded into {scale.folds} parts of {scale.width * scale.step:.4g} {unit}")
    return notes
