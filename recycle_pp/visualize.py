"""Draws schedules: plans, and traces of real steps.

    python -m recycle_pp.visualize plan.json                                    # in the terminal
    python -m recycle_pp.visualize --pipelines 3 --stages 4 --microbatches 6 --fail 1.2
    python -m recycle_pp.visualize parallel=2x4 +fail_at=20:0.1                 # a trainer's command line
    python -m recycle_pp.visualize runs/demo --step 20 --out step.svg           # a run folder
    python -m recycle_pp.visualize runs/demo --out run.html                     # a page with all its traced steps
    python -m recycle_pp.visualize --compare plan.json trace.json
    python -m recycle_pp.visualize runs/demo --follow

A problem with layers and deaths is drawn twice: with re-routed work, and with moved boundaries between stages.
The suffix of --out selects the format: .svg .png .pdf (figures), .html (a page), .json (Chrome trace), .csv (torch's
notation).
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from recycle_schedules import Plan, plan, plan_layout
from recycle_schedules.planner import plan_rerouted
from rich.console import Console

from recycle_pp.command import exit_code
from recycle_pp.drawing import page, perfetto, terminal, torch_csv
from recycle_pp.drawing.chart import Chart
from recycle_pp.drawing.report import Baselines
from recycle_pp.drawing.sources import SAME_LAYERS, baselines, before_move, charts_of, progress, title_of, totals
from recycle_pp.fitting.problem_source import Source, add_arguments, compile_planner, read_file, read_source
from recycle_pp.telemetry.heartbeat import Pulse
from recycle_pp.telemetry.run_reader import RunReader
from recycle_pp.telemetry.stored_run import local
from recycle_pp.wire.records import Step

FIGURES = (".svg", ".png", ".pdf")
ENDINGS = (*FIGURES, ".html", ".json", ".csv")
SECONDS = 0.5  # seconds of search for a plan, as in `recycle_pp.plan`
POLL = 0.5  # seconds between checks of a running job


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0; 2 after printing one sentence about an error; 130 if interrupted."""
    return exit_code(lambda: _run(_parser().parse_intermixed_args(argv)), "visualize")


def _run(arguments: argparse.Namespace) -> int:
    for flag, value, least in (("width", arguments.width, 1), ("inches", arguments.inches, 1e-9)):
        if value is not None and not least <= value < math.inf:
            raise ValueError(f"--{flag} must be above 0, not {value:g}")
    for flag, value in (("from", arguments.begin), ("to", arguments.end)):
        if value is not None and not math.isfinite(value):
            raise ValueError(f"--{flag} must be a time, not {value:g}")
    arguments.source = [local(name) for name in arguments.source]
    if not arguments.follow:
        return _once(arguments)
    with suppress(KeyboardInterrupt):  # Ctrl-C ends --follow normally
        return _follow(arguments)
    return 0


# ---- charts


def _once(a: argparse.Namespace) -> int:
    """Draws to the files in --out, or to the terminal."""
    for out in a.out:
        if Path(out).suffix.lower() not in ENDINGS:
            raise ValueError(f"--out {out}: the ending must be one of {', '.join(ENDINGS)}")
    if a.compare and (a.source or a.pipelines):
        raise ValueError("--compare takes exactly two sources; remove the others")
    source = None if a.compare else read_source(a)
    charts = [_named(name, a.step) for name in a.compare] if source is None else _charts(a, source)
    run = source.run if source and source.shown is not None else None
    step, problem = (source.step, source.problem) if source else (0, None)
    shown = {chart.title for chart in charts}
    against = [] if a.compare else baselines(charts[-1].plan, run, step, problem)
    against = [b for b in against if b[0].removesuffix(SAME_LAYERS) not in shown]
    for out in a.out:
        if run and Path(out).suffix.lower() == ".html":
            page.save(_all_steps(run), out, title=a.title or str(run.folder.path), first=run.traced().index(step))
            print(f"wrote {out}")
        else:
            notes = _write(charts, against, out, a)
            print("; ".join([f"wrote {out}", *notes]))
    if not a.out:
        rows = sys.maxsize if a.all else 48
        console = _console(a)
        terminal.show(charts, console, window=_window(a, charts), most_rows=rows, baselines=against)
        if source and source.run and (sentence := totals(source.run)):
            console.print(sentence)
    return 0


def _charts(a: argparse.Namespace, source: Source) -> list[Chart]:
    """The charts to draw. If there are several, the others are compared with the first one."""
    if source.run and source.shown is not None:
        before = before_move(source.run, source.step)
        return [*before, *charts_of(source.run, source.step, with_plan=a.with_plan)]
    chosen = _plan_of(source)
    moved = source.problem.layers is not None and bool(source.problem.dead)
    charts = [Chart.of(chosen, "boundaries moved" if moved else title_of(chosen) if a.against else "")]
    if moved:  # for comparison: re-routed work, with unchanged boundaries
        rerouted = plan_rerouted(source.problem, seconds=SECONDS)
        charts.insert(0, Chart.of(replace(rerouted, time_unit=source.unit), "re-routed"))
    if not a.against:
        return charts
    known = {name.removesuffix(SAME_LAYERS): plan for name, plan in baselines(charts[-1].plan, problem=source.problem)}
    name = "fault-free 1F1B" if a.against == "1f1b" else "fault-free"
    if name not in known:
        raise ValueError(
            f"--against {a.against}: nothing to compare with, since no worker is dead or this is not a whole step"
        )
    return [Chart.of(known[name], name), *charts]


def _plan_of(source: Source) -> Plan:
    if source.shown is not None:
        return source.shown
    compile_planner()
    make = plan if source.problem.layers is None else plan_layout
    return source.named(make(source.problem, seconds=SECONDS))


def _window(a: argparse.Namespace, charts: list[Chart]) -> tuple[float, float] | None:
    if a.begin is None and a.end is None:
        return None
    begin, end = a.begin or 0.0, max(c.span for c in charts) if a.end is None else a.end
    if begin >= end:
        raise ValueError(f"--to ({end:g}) must be later than --from ({begin:g})")
    return begin, end


def _named(name: str, step: int | None) -> Chart:
    """The chart of a file or run folder, with its name as title."""
    if Path(name).is_dir():
        run = RunReader(name)
        at = run.last_recovery() if step is None else step
        return Chart.of(run.trace(at), f"{Path(name).resolve().name}, step {at}")
    return Chart.of(_plan_of(read_file(name)), Path(name).name)


# ---- output


def _write(charts: list[Chart], against: Baselines, out: str, a: argparse.Namespace) -> list[str]:
    """Writes one file. Returns sentences about omitted rows."""
    ending = Path(out).suffix.lower()
    if ending in FIGURES:
        from recycle_pp.drawing import figure  # slow import

        return figure.save(charts, out, beside=a.beside, width=a.inches)
    if ending == ".html":
        name = title_of(charts[-1].plan)
        page.save([page.Step(name, charts, baselines=against)], out, title=a.title or name)
    elif ending == ".json":
        perfetto.save(charts, out)
    else:
        torch_csv.save(charts[-1], out)
        return ["only the last chart"] if len(charts) > 1 else []
    return []


def _all_steps(run: RunReader) -> list[page.Step]:
    """A `page.Step` for every traced step."""
    stops = []
    for step in run.traced():
        charts = charts_of(run, step, with_plan=True)
        note = "a worker died in this step" if charts[0].recovery else ""
        stops.append(page.Step(f"step {step}", charts, note, baselines(charts[0].plan, run, step)))
    return stops


class _Terminal(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # the rich library would otherwise exit with code 1


def _console(a: argparse.Namespace) -> Console:
    return _Terminal(width=a.width, highlight=False)


def _follow(a: argparse.Namespace) -> int:
    """Draws the newest step whenever a new trace appears, until the run has ended."""
    if len(a.source) != 1 or not Path(a.source[0]).is_dir():
        raise ValueError("--follow needs a run folder")
    run, console = RunReader(a.source[0]), _console(a)
    lines, pulse = run.follow().steps, Pulse(run.folder)
    last: Step | None = None
    drawn, printed = None, ""
    while True:
        ended, traced = run.folder.summary.exists() or pulse.ended(), run.traced()
        if traced and traced[-1] != drawn:
            drawn = a.step = traced[-1]
            if console.is_terminal and not a.out:
                console.clear()
            _once(a)
        for line in lines.each():
            last = line
        if lines.damage is not None:
            raise lines.damage
        if (text := progress(last)) != printed:
            console.print(text, end="\r" if console.is_terminal else "\n")
            printed = text
        if ended:
            console.print(f"the run has ended, {text}")
            return 0
        time.sleep(POLL)


def _parser() -> argparse.ArgumentParser:
    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> None:  # type: ignore[override]
            raise ValueError(message)

    about, _, more = (__doc__ or "").partition("\n\n")
    p = Parser(
        "python -m recycle_pp.visualize",
        description=about,
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(p)
    p.add_argument("--compare", nargs=2, metavar=("A", "B"), help="two files or run folders, one above the other")
    p.add_argument(
        "--against", choices=("1f1b", "fault-free"), help="also draw the job without deaths: as 1F1B, or as planned"
    )
    p.add_argument(
        "--with-plan", action="store_true", help="for a run folder: also draw the planner's plan of the step"
    )
    p.add_argument("--follow", action="store_true", help="redraw while the run continues")
    out = p.add_argument_group("output")
    out.add_argument(
        "--out", action="append", default=[], metavar="FILE", help=f"{' '.join(ENDINGS)}; default: the terminal"
    )
    out.add_argument("--beside", action="store_true", help="figures: charts side by side, not one above the other")
    out.add_argument("--inches", type=float, help="figures: their width")
    out.add_argument("--title", help="title of a page")
    out.add_argument("--width", type=int, help="terminal: columns")
    out.add_argument("--from", type=float, dest="begin", metavar="T", help="terminal: start at this time")
    out.add_argument("--to", type=float, dest="end", metavar="T", help="terminal: end at this time")
    out.add_argument("--all", action="store_true", help="terminal: draw all pipelines")
    return p


if __name__ == "__main__":
    sys.exit(main())
