"""A comparison as one self-contained html page: picture, table and assumptions. Needs no network and no script.

page.save(comparison, "report.html")
"""

from __future__ import annotations

import html
from pathlib import Path

from . import picture, report
from .compare import Comparison
from .run import CAUSES

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #14181F; background: #fff; max-width: 62rem; margin: 2rem auto;
       padding: 0 1rem }
h1 { font-size: 1.3rem } svg { width: 100%; height: auto } table { border-collapse: collapse; font-size: 13px }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #DADDE3; font-variant-numeric: tabular-nums }
th:first-child, td:first-child { text-align: left } .scroll { overflow-x: auto } li { margin: .2rem 0 }
"""


def save(comparison: Comparison, path: str | Path) -> None:
    """Writes the page."""
    Path(path).write_text(render(comparison), encoding="utf-8")


def render(comparison: Comparison) -> str:
    names = comparison.outcomes
    p = comparison.job.problem
    title = f"{p.pipelines} x {p.stages} workers on {comparison.there.machines} machines that come and go"
    head = "".join(f"<th scope=col>{html.escape(name)}</th>" for name in ("policy", "1F1B = 1", "work", *CAUSES))
    rows = "".join(
        f"<tr><td>{name}</td><td>{names[name].relative:.3f}</td>"
        + "".join(f"<td>{100 * names[name].shares[key]:z.1f} %</td>" for key in ("work", *CAUSES))
        + "</tr>"
        for name in names
    )
    summary = "; ".join(report.summary(comparison))
    notes = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in report.remarks(comparison))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title><style>{STYLE}</style></head>
<body><h1>{html.escape(title)}</h1><p>{html.escape(summary)}</p>
<figure role="img" aria-label="Throughput and machines over time, and where time went; the table has the same figures">
{picture.svg(comparison)}</figure>
<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>
<ul>{notes}</ul></body></html>
"""
