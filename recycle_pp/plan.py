"""Plans a step for any set of live workers, and prints its figures.

    python -m recycle_pp.plan --pipelines 3 --stages 4 --microbatches 6 --fail 1.2
    python -m recycle_pp.plan parallel=2x4 emulate=sleep +fail_at=20:0.1     # a trainer's command line
    python -m recycle_pp.plan problem.json --out plan.json --seconds 1
    python -m recycle_pp.plan runs/demo --step 20                            # what really ran
    python -m recycle_pp.plan --fail 1.2 --what-if --bytes 2GB --capacity 16GB
    python -m recycle_pp.plan --memory 80GB --model llama8b parallel=2x4     # does it fit, and after deaths?
    python -m recycle_pp.plan model=llama1b parallel=2x4 --islands 3     # traffic of islands (docs/islands.md)
    python -m recycle_pp.plan --pipelines 1 --stages 4 --microbatches 8 --csv plan.csv      # torch's notation

A problem is planned. A plan, a trace or a run folder is shown as it is. It is planned again only if flags change its
problem or --seconds requests a search. Ctrl-C ends a long search with the best plan so far. docs/planner.md explains
every key, and docs/figures.md every figure.

If a problem file gives `layers` instead of durations, the planner also chooses the boundaries between stages. The
plan's `layout` is the number of layers in each stage:

    "layers": {"F": [1, 1, 1, 1, 2], "I": [1, 1, 1, 1, 2], "W": [1, 1, 1, 1, 2]}

The key `links` of a problem file gives the hosts of the workers and the durations of messages between them:

    "links": {"hosts": [["a", "a"], ["b", "b"]], "zones": {"a": "west", "b": "east"}, "bytes": 4e6,
              "within_host": {"latency": 1e-5, "bandwidth": 2e10}, "between_hosts": {"latency": 1e-4, "bandwidth": 1e9}}
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from recycle_schedules import Plan, Problem
from recycle_schedules.analysis.torch_csv import torch_csv
from recycle_schedules.planner import layout_plans, plans
from rich.console import Console

from recycle_pp.command import exit_code, parser_of
from recycle_pp.config.sizes import parse_size
from recycle_pp.drawing import report
from recycle_pp.drawing.chart import Chart
from recycle_pp.drawing.measures import Measures
from recycle_pp.drawing.sources import baselines, totals
from recycle_pp.fitting.deaths_table import show_deaths
from recycle_pp.fitting.island_costs import LINK, SHARE, show_costs
from recycle_pp.fitting.memory_table import capacity_of, show
from recycle_pp.fitting.problem_source import Source, add_arguments, compile_planner, read_source

SECONDS = 0.5  # seconds of search


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0; 2 after printing one sentence about an error; 130 if interrupted before the first
    plan."""
    return exit_code(lambda: _run(_parser().parse_intermixed_args(argv)))


def _run(arguments: argparse.Namespace) -> int:
    size, capacity = (
        None if text is None else parse_size(text, flag)
        for flag, text in (("--bytes", arguments.bytes), ("--capacity", arguments.capacity))
    )
    _check(arguments)
    if (bytes_of_worker := capacity_of(arguments.memory)) is not None:
        return show(arguments, bytes_of_worker, Console(width=None if sys.stdout.isatty() else 200))
    if arguments.islands is not None:
        return show_costs(arguments, Console(width=None if sys.stdout.isatty() else 200))
    if arguments.model is not None:
        raise ValueError("--model requires --memory, the memory of a worker, for instance --memory 80GB")
    source = read_source(arguments, prefer_shown=arguments.seconds is None, required=False)
    if arguments.csv and source.problem.dead:
        raise ValueError("--csv: only a fault-free plan has a torch CSV")
    # a file or a pipe has no width of its own
    console = Console(width=None if sys.stdout.isatty() else 160)
    if arguments.what_if:
        compile_planner()
        show_deaths(console, source, arguments.seconds, size, capacity, as_json=arguments.json)
        return 0
    best = source.shown  # compared with None, because a plan without ops is falsy
    if best is None:
        best = _planned(source, SECONDS if arguments.seconds is None else arguments.seconds)
    csv = torch_csv(best) if arguments.csv else ""  # before the first file is written, because it may be refused
    if arguments.out:
        best.save(arguments.out)
    if arguments.csv:
        Path(arguments.csv).write_text(csv)
    if arguments.json:
        print(json.dumps(_as_json(best), indent=1))
    else:
        chart = Chart.of(best)
        run = source.run if source.shown is not None else None
        console.print(report.table([chart], baselines(chart.plan, run, source.step, source.problem)))
        for sentence in report.recovery(chart):
            console.print(sentence, highlight=False)
        if source.run and (sentence := totals(source.run)):
            console.print(sentence, highlight=False)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("plan", __doc__)
    add_arguments(parser)
    add = parser.add_argument
    add("--out", help="write the plan to this file (JSON)")
    add("--csv", help="write a fault-free plan to this file, in the CSV format of torch.distributed.pipelining")
    add("--json", action="store_true", help="print the figures as JSON")
    add("--seconds", type=float, help=f"search time; ends early at a provable optimum (default {SECONDS:g})")
    add("--what-if", action="store_true", help="print a table with one row for every worker that could die next")
    add(
        "--model", metavar="llama8b", help="for --memory 80GB: a model of configs/model, or a folder with a config.json"
    )
    add("--islands", type=int, metavar="N", help="print bytes, seconds and dollars of a round of N islands")
    add("--link", type=float, default=LINK, metavar="1", help="for --islands: Gb/s between an island and the store")
    add("--share", type=float, default=SHARE, metavar="0.05", help="for --islands: share of the time for transfers")
    add("--step-seconds", type=float, metavar="12", help="for --islands: duration of a step")
    add("--bytes", metavar="2GB", help="size of one micro-batch in flight on a worker, for --what-if")
    add("--capacity", metavar="16GB", help="memory of a worker for micro-batches in flight, for --what-if")
    return parser


def _check(arguments: argparse.Namespace) -> None:
    """Rejects arguments that would otherwise fail only after the search."""
    if arguments.seconds is not None and not arguments.seconds >= 0:
        raise ValueError(f"--seconds: {arguments.seconds:g} is not a time")
    if arguments.capacity is not None and arguments.bytes is None:
        raise ValueError("--capacity requires --bytes, the size of one micro-batch in flight")
    for name in ("out", "csv"):
        folder = Path(getattr(arguments, name) or ".").parent
        if not folder.is_dir():
            raise ValueError(f"--{name}: there is no folder {folder}")


def _planned(source: Source, seconds: float) -> Plan:
    compile_planner()
    return source.named(_search(source.problem, seconds))


def _search(problem: Problem, seconds: float) -> Plan:
    """The best plan found within `seconds`. Prints a progress line. Ctrl-C ends the search early."""
    begin, said = time.perf_counter(), 0.0
    best: Callable[[], Plan] | None = None
    pressed = False

    def press(number: int, frame: Any) -> None:
        # Once there is a plan, the first Ctrl-C only sets a flag, because compiled code may swallow an exception.
        nonlocal pressed
        if pressed or best is None:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        for best in plans(problem) if problem.layers is None else layout_plans(problem):
            spent = time.perf_counter() - begin
            if spent >= seconds:
                break
            if pressed:
                print("\nstopped; this is the best plan so far", file=sys.stderr)
                break
            if sys.stderr.isatty() and spent - said > 0.5:
                said = spent
                now = best()
                print(
                    f"\r{spent:6.1f} s of {seconds:g}: {now.value:g}, bound {now.lower_bound:g} ",
                    end="",
                    file=sys.stderr,
                )
    finally:
        signal.signal(signal.SIGINT, before)
    if said:
        print(file=sys.stderr)
    assert best is not None
    return best()


def _as_json(plan: Plan) -> dict[str, Any]:
    """The figures of a plan and its problem. Times are in `time_unit`."""
    chart = Chart.of(plan)
    m = Measures.of(chart)
    value = m.makespan if m.period is None else m.period
    return {
        "problem": chart.problem.to_json(),
        "time_unit": chart.unit,
        "layout": chart.plan.layout,
        "period": m.period,
        "makespan": m.makespan,
        "lower_bound": m.lower_bound,
        "gap": value / m.lower_bound - 1 if m.lower_bound else None,
        "bubbles": m.idle,
        "bubbles_by_stage": m.bubble,
        "peak_in_flight_by_stage": m.peak,
        "rerouted_ops": m.rerouted,
        "lost_ops": m.lost,
        "redone_ops": m.redone,
    }


if __name__ == "__main__":
    sys.exit(main())
