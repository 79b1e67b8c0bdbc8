"""A comparison as a picture. The file's suffix selects svg, png or pdf.

    save(comparison, "report.svg")

Top: throughput over time, by policy. Middle: machines that are up. Bottom: where the workers' time went.
"""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from recycle_schedules import OpKind

from recycle_pp.drawing import palette
from recycle_pp.drawing.figure import STYLE

from .availability import DAY, HOUR, MINUTE
from .compare import Comparison
from .run import CAUSES, Outcome

GREY = "#8A8F98"
LINES = {
    "restart": (GREY, ":"), "spares": (GREY, "--"), "torchft": ("#6B4C9A", "--"), "oobleck": (palette.ALARM, "--"),
    "bamboo": (palette.ALARM, ":"), "recycle": ("#E97B2E", "-"), "rerouted": ("#1F7F62", "-"),
    "rebalanced": ("#1B6FB5", "-"), "bound": (palette.INK, ":"),
}  # fmt: skip
"""Colour and line style of each policy."""
BARS = {
    "work": palette.FILL[OpKind.FORWARD],
    "schedule": palette.FILL[OpKind.BACKWARD_WEIGHT],
    "redone": palette.FILL[OpKind.OPTIMIZER],
    "checkpoints": "#B9A3D8",
    "recovering": palette.ALARM,
    "idle": palette.FILL[OpKind.BACKWARD_INPUT],
    "away": "#D5D8DD",
}
HATCHES = {"recovering": "xxxx", "redone": "////", "idle": "....", "away": "\\\\\\\\"}
WORDS = {"schedule": "bubbles, uneven loads", "away": "down"}
POINTS = 80
"""Number of intervals of a curve, which shows the mean over each interval. Shorter intervals would not be visible."""


def save(comparison: Comparison, path: str | Path) -> None:
    """Draws and writes the picture, in the format of the suffix (.svg, .png, .pdf)."""
    suffix = Path(path).suffix.lstrip(".").lower()
    Path(path).write_bytes(_written(comparison, suffix))


def svg(comparison: Comparison) -> str:
    """The picture as markup, without the XML declaration."""
    text = _written(comparison, "svg").decode()
    return text[text.index("<svg") :]


def _written(comparison: Comparison, suffix: str) -> bytes:
    out = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(suffix)
        draw(comparison).savefig(out, format=suffix, dpi=200, metadata=metadata)
    return out.getvalue()


def draw(comparison: Comparison) -> Figure:
    names = list(comparison.outcomes)
    rows = 0.24 * len(names)
    height = 3.1 + 1.0 + rows + 1.4
    figure = Figure(figsize=(7.2, height))
    FigureCanvasAgg(figure)
    left, width, top = 0.105, 0.735, height

    def panel(inches: float, gap: float) -> Axes:
        nonlocal top
        top -= inches + gap
        return figure.add_axes((left, top / height, width, inches / height))

    speed, machines, losses = panel(2.7, 0.35), panel(0.8, 0.3), panel(rows, 0.65)
    unit, name = _unit(comparison.there.seconds)
    _speed(speed, comparison, unit)
    _machines(machines, comparison, unit, name)
    _losses(losses, comparison)
    return figure


def _speed(axes: Axes, comparison: Comparison, unit: float) -> None:
    last = {}
    for policy, outcome in comparison.outcomes.items():
        colour, dashes = LINES[policy]
        edges, values = averaged(outcome)
        axes.stairs(values, edges / unit, baseline=None, color=colour, ls=dashes, lw=1.1, gid=f"speed-{policy}")
        last[policy] = outcome.relative
    axes.axhline(1, color="#9AA0AA", lw=0.5, zorder=0)
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, comparison.there.seconds / unit)
    axes.set_title("throughput, fault-free 1F1B = 1", loc="left", fontsize=9, fontweight="bold")
    axes.tick_params(labelbottom=False)
    _plain(axes)
    step = axes.get_ylim()[1] * 0.062  # labels beside the axes, at their means, without overlap
    place = 0.0
    for policy, mean in sorted(last.items(), key=lambda item: item[1]):
        place = max(mean - step / 2, place)
        axes.annotate(f"{policy} {mean:.2f}", (1.01, place), xycoords=("axes fraction", "data"), fontsize=7,
                      color=LINES[policy][0], annotation_clip=False)  # fmt: skip
        place += step


def _machines(axes: Axes, comparison: Comparison, unit: float, name: str) -> None:
    there = comparison.there
    spans = list(there.counts())
    edges = np.array([spans[0][0], *(end for _, end, _ in spans)])
    edges, values = _means(edges, np.array([n for *_, n in spans], float), there.seconds)
    axes.stairs(values, edges / unit, color=palette.DEAD, fill=True, alpha=0.5, gid="machines")
    axes.set_xlim(0, there.seconds / unit)
    axes.set_ylim(0, there.machines * 1.05)
    axes.set_title("machines there", loc="left", fontsize=8)
    axes.set_xlabel(name, fontsize=7, labelpad=1)
    _plain(axes)


def _losses(axes: Axes, comparison: Comparison) -> None:
    names = list(comparison.outcomes)
    begin = np.zeros(len(names))
    for cause in ("work", *reversed(CAUSES)):
        share = np.array([max(0.0, comparison.outcomes[name].shares[cause]) for name in names])
        if share.max() > 5e-4:
            axes.barh(names, share, left=begin, color=BARS[cause], label=WORDS.get(cause, cause), height=0.72,
                      hatch=HATCHES.get(cause), edgecolor=palette.PAPER, lw=0.3)  # fmt: skip
        begin += share
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    axes.set_title("where the workers' time went", loc="left", fontsize=8)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4, frameon=False, fontsize=7, handlelength=1.4)
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.tick_params(length=2.5, width=0.6, labelsize=7, pad=2)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def averaged(outcome: Outcome) -> tuple[np.ndarray, np.ndarray]:
    """The pace over time as a step curve: edges (n + 1,) in seconds, mean paces (n,) relative to fault-free 1F1B."""
    at = np.array([point[0] for point in outcome.curve])
    pace = np.array([point[1] for point in outcome.curve])
    return _means(np.append(at, outcome.seconds), pace, outcome.seconds)


def _means(edges: np.ndarray, values: np.ndarray, seconds: float) -> tuple[np.ndarray, np.ndarray]:
    """Means over POINTS intervals of a function that equals `values` between `edges`."""
    area = np.concatenate([[0.0], np.cumsum(values * np.diff(edges))])
    wide = np.linspace(0, seconds, POINTS + 1)
    return wide, np.diff(np.interp(wide, edges, area)) / np.diff(wide)


def _unit(seconds: float) -> tuple[float, str]:
    if seconds > 3 * DAY:
        return DAY, "days"
    return (HOUR, "hours") if seconds > 2 * HOUR else (MINUTE, "minutes")
