"""Draws schedules: plans, and what really happened in a step.

    python -m recycle_pp.visualize plan.json                                    # in the terminal
    python -m recycle_pp.visualize --pipelines 3 --stages 4 --microbatches 6 --fail 1.2
    python -m recycle_pp.visualize runs/demo --step 20 --out step.svg           # a run folder
    python -m recycle_pp.visualize runs/demo --out run.html                     # a page with all its traced steps
    python -m recycle_pp.visualize --compare plan.json trace.json
    python -m recycle_pp.visualize runs/demo --follow

The ending of --out decides: .svg .png .pdf (figures), .html (a page), .json (Chrome trace), .csv (torch's notation).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from recycle_schedules import Problem, Worker, plan
from rich.console import Console

from recycle_pp.drawing import page, perfetto, terminal, torch_csv
from recycle_pp.drawing.chart import Chart
from recycle_pp.drawing.report import Baselines
from recycle_pp.drawing.sources import Run, baselines, charts_of, read, title_of

FIGURES = (".svg", ".png", ".pdf")
ENDINGS = (*FIGURES, ".html", ".json", ".csv")
POLL = 0.5  # seconds between looks at a run that goes on


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 2 after one sentence about what is wrong."""
    try:
        arguments = _parser().parse_args(argv)
        return _follow(arguments) if arguments.follow else _once(arguments)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 0
    except OSError as e:
        sentence = f"{e.filename}: {e.strerror}" if e.filename else str(e)
    except ValueError as e:
        sentence = str(e)
    print(f"visualize: {sentence}", file=sys.stderr)
    return 2


# ---- what to draw


def _once(a: argparse.Namespace) -> int:
    """To the files of --out, or to the terminal."""
    for out in a.out:
        if Path(out).suffix.lower() not in ENDINGS:
            raise ValueError(f"--out {out}: the ending must be one of {', '.join(ENDINGS)}")
    run = Run(a.source) if a.source and Path(a.source).is_dir() else None
    if a.step is not None and a.source and not run:
        raise ValueError(f"--step needs a run folder, and {a.source} is a file")
    step = 0 if not run else run.newest if a.step is None else a.step
    charts = _charts(a, run, step)
    shown = {chart.title for chart in charts}
    against = [] if a.compare else [b for b in baselines(charts[-1].plan, run, step) if b[0] not in shown]
    for out in a.out:
        if run and Path(out).suffix.lower() == ".html":
            page.save(_all_steps(run), out, title=a.title or str(run.path), first=run.steps.index(step))
            print(f"wrote {out}")
        else:
            notes = _write(charts, against, out, a)
            print("; ".join([f"wrote {out}", *notes]))
    if not a.out:
        rows = sys.maxsize if a.all else 48
        terminal.show(charts, _console(a), window=_window(a, charts), most_rows=rows, baselines=against)
    return 0


def _charts(a: argparse.Namespace, run: Run | None, step: int) -> list[Chart]:
    """One chart, or those to compare; the one that everything is measured against first."""
    if a.compare:
        if a.source or a.pipelines:
            raise ValueError("--compare brings its own two sources; leave out the others")
        return [_named(name, a.step) for name in a.compare]
    if run:
        return charts_of(run, step, with_plan=a.with_plan)
    if a.source and a.pipelines:
        raise ValueError("either a file or a problem on flags (--pipelines ...), not both")
    chosen = read(a.source) if a.source else plan(_problem(a))
    if not a.against:
        return [Chart.of(chosen)]
    known = dict(baselines(chosen))
    name = "fault-free 1F1B" if a.against == "1f1b" else "fault-free"
    if name not in known:
        raise ValueError(
            f"--against {a.against}: nothing to compare with, since nobody is dead or this is no whole step"
        )
    return [Chart.of(known[name], name), Chart.of(chosen, title_of(chosen))]


def _window(a: argparse.Namespace, charts: list[Chart]) -> tuple[float, float] | None:
    if a.begin is None and a.end is None:
        return None
    begin, end = a.begin or 0.0, max(c.span for c in charts) if a.end is None else a.end
    if begin >= end:
        raise ValueError(f"--to must be later than --from; from {begin:g} to {end:g} is nothing")
    return begin, end


def _named(name: str, step: int | None) -> Chart:
    """A chart whose title is its source."""
    if Path(name).is_dir():
        run = Run(name)
        at = run.newest if step is None else step
        return Chart.of(run.trace(at), f"{Path(name).resolve().name}, step {at}")
    return Chart.of(read(name), Path(name).name)


def _problem(a: argparse.Namespace) -> Problem:
    if None in (a.pipelines, a.stages, a.microbatches):
        raise ValueError(
            "what to draw? a file, a run folder, --compare A B, or --pipelines, --stages and --microbatches"
        )
    return Problem(
        pipelines=a.pipelines, stages=a.stages, microbatches=a.microbatches, failed=[Worker.parse(w) for w in a.fail],
        durations=_durations(a.durations), memory_limit=_memory(a.memory), optimizer=a.optimizer, backward=a.backward,
        send=a.send, reroute=a.reroute,
    )  # fmt: skip


def _durations(text: str) -> dict[str, float]:
    """F=1,I=1,W=1,O=3"""
    try:
        return {k.strip(): float(v) for k, v in (part.split("=") for part in text.split(",") if part)}
    except ValueError:
        raise ValueError(f"--durations {text}: write them as F=1,I=1,W=1,O=3") from None


def _memory(text: str) -> object:
    """none, a number, or 1f1b+2"""
    if text == "none":
        return None
    if text.isdecimal():
        return int(text)
    base, _, extra = text.partition("+")
    if base != "1f1b" or (extra and not extra.isdecimal()):
        raise ValueError(f"--memory {text}: write none, a number of micro-batches, or 1f1b+2")
    return {"base": "1f1b", "extra": int(extra or 0)}


# ---- where to


def _write(charts: list[Chart], against: Baselines, out: str, a: argparse.Namespace) -> list[str]:
    """One file; what it leaves out, in sentences."""
    ending = Path(out).suffix.lower()
    if ending in FIGURES:
        from recycle_pp.drawing import figure  # matplotlib takes its time

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


def _all_steps(run: Run) -> list[page.Step]:
    """A stop of the page's slider for every traced step."""
    stops = []
    for step in run.steps:
        charts = charts_of(run, step, with_plan=True)
        note = "somebody died in this step" if charts[0].recovery else ""
        stops.append(page.Step(f"step {step}", charts, note, baselines(charts[0].plan, run, step)))
    return stops


class _Terminal(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would leave with 1


def _console(a: argparse.Namespace) -> Console:
    return _Terminal(width=a.width, highlight=False)


def _follow(a: argparse.Namespace) -> int:
    """Draws the newest step whenever a new trace appears, until the run has ended."""
    if not a.source:
        raise ValueError("--follow needs a run folder")
    run, console, drawn, said = Run(a.source), _console(a), None, ""
    while True:
        ended, steps = run.ended, run.steps
        if steps and steps[-1] != drawn:
            drawn = a.step = steps[-1]
            if console.is_terminal and not a.out:
                console.clear()
            _once(a)
        progress = run.progress()
        if progress != said:
            console.print(progress, end="\r" if console.is_terminal else "\n")
            said = progress
        if ended:
            console.print(f"the run has ended, {progress}")
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
    p.add_argument("source", nargs="?", help="a file with a plan, a trace or a problem, or a run folder")
    p.add_argument("--step", type=int, help="of a run folder; default: the last in which somebody died")
    p.add_argument("--compare", nargs=2, metavar=("A", "B"), help="two files or run folders, one above the other")
    p.add_argument(
        "--against", choices=("1f1b", "fault-free"), help="also the same job with nobody dead: as 1F1B, or as planned"
    )
    p.add_argument(
        "--with-plan", action="store_true", help="of a run folder: also the plan that the planner makes of it"
    )
    p.add_argument("--follow", action="store_true", help="draw again while the run goes on")
    out = p.add_argument_group("output")
    out.add_argument(
        "--out", action="append", default=[], metavar="FILE", help=f"{' '.join(ENDINGS)}; default: the terminal"
    )
    out.add_argument("--beside", action="store_true", help="figures: charts side by side, not one above the other")
    out.add_argument("--inches", type=float, help="figures: their width")
    out.add_argument("--title", help="of a page")
    out.add_argument("--width", type=int, help="terminal: columns")
    out.add_argument("--from", type=float, dest="begin", metavar="T", help="terminal: begin at this time")
    out.add_argument("--to", type=float, dest="end", metavar="T", help="terminal: end at this time")
    out.add_argument("--all", action="store_true", help="terminal: every pipeline, however many")
    job = p.add_argument_group("a problem on flags")
    job.add_argument("--pipelines", type=int)
    job.add_argument("--stages", type=int)
    job.add_argument("--microbatches", type=int, help="per pipeline")
    job.add_argument(
        "--fail", action="append", default=[], metavar="D.S", help="a dead worker, like 1.2; may be repeated"
    )
    job.add_argument("--durations", default="F=1,I=1,W=1,O=1")
    job.add_argument("--memory", default="1f1b+2", help="micro-batches in flight a worker: none, a number, 1f1b+2")
    job.add_argument("--optimizer", default="staggered", choices=("staggered", "barrier", "none"))
    job.add_argument("--backward", default="mixed", choices=("mixed", "coupled", "decoupled"))
    job.add_argument("--reroute", default="failed_only", choices=("failed_only", "any"))
    job.add_argument("--send", type=float, default=0.0, help="latency between stages")
    return p


if __name__ == "__main__":
    sys.exit(main())
