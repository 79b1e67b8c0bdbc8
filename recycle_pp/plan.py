"""Plans a step for any set of live workers.

    python -m recycle_pp.plan problem.json --out plan.json --seconds 1
    python -m recycle_pp.plan --pipelines 3 --stages 4 --microbatches 6 --fail 1.2 --memory 1f1b+2
    python -m recycle_pp.plan --pipelines 3 --stages 4 --microbatches 6 --what-if --bytes 2e9 --capacity 16e9
    python -m recycle_pp.plan --pipelines 1 --stages 4 --microbatches 8 --csv plan.csv      # torch's notation

The key `links` of a problem file says on which hosts the workers run and what a message takes between them:

    "links": {"hosts": [["a", "a"], ["b", "b"]], "zones": {"a": "west", "b": "east"}, "bytes": 4e6,
              "within_host": {"latency": 1e-5, "bandwidth": 2e10}, "between_hosts": {"latency": 1e-4, "bandwidth": 1e9}}

Ctrl-C ends a long search with the best plan so far. docs/planner.md explains every key and column.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from recycle_schedules import Plan, Problem, Worker
from recycle_schedules.analysis.summary import Baselines, summary
from recycle_schedules.analysis.torch_csv import torch_csv
from recycle_schedules.analysis.what_if import Table, what_if
from recycle_schedules.compiled import load
from recycle_schedules.planner import plans
from rich.console import Console
from rich.table import Table as Grid


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0; 2 after one sentence about what is wrong; 130 if it was interrupted before there was a plan."""
    arguments = _parser().parse_args(argv)
    try:
        return _run(arguments)
    except (ValueError, OSError) as error:
        print(f"error: {_sentence(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130


def _run(arguments: argparse.Namespace) -> int:
    problem = _problem(arguments)
    _check(arguments)
    if not load(timeout=1.0):
        print(
            "compiling the planner's inner loops: about half a minute, once on this machine",
            file=sys.stderr,
            flush=True,
        )
        load()
    console = Console(width=None if sys.stdout.isatty() else 160)  # a file's lines are not cut to a terminal's
    if arguments.what_if:
        _show_deaths(console, problem, arguments)
        return 0
    best = replace(_search(problem, arguments.seconds), time_unit=arguments.unit)
    if arguments.out:
        best.save(arguments.out)
    if arguments.csv:
        Path(arguments.csv).write_text(torch_csv(best))
    grid = Grid(show_header=False, box=None, padding=(0, 2, 0, 0))
    for row in summary(best, None if problem.remainder else Baselines.of(problem, min(arguments.seconds, 0.2))):
        grid.add_row(*row)
    console.print(grid)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recycle_pp.plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("problem", nargs="?", help="problem file (JSON); its keys win over none, flags win over its keys")
    add("--out", help="where the plan is written (JSON)")
    add("--csv", help="where a fault-free plan is written in torch.distributed.pipelining's CSV")
    add("--seconds", type=float, default=0.5, help="search time; ends early at a provable optimum (default 0.5)")
    add("--unit", default="slots", choices=("slots", "ms", "s"), help="what the problem's times are (default slots)")
    add("--pipelines", type=int)
    add("--stages", type=int)
    add("--microbatches", type=int, help="per pipeline")
    add("--fail", nargs="+", default=None, metavar="D.S", help="dead workers")
    add("--durations", metavar="F=1,I=1,W=1,O=1", help="one number an op, or one per stage: F=1/1/2/1")
    add("--memory", metavar="1f1b+2", help="none, a number, one per stage (4/3/6/1), or 1f1b+k")
    add("--backward", choices=("decoupled", "coupled", "mixed"))
    add("--optimizer", choices=("staggered", "barrier", "none"))
    add("--reroute", choices=("failed_only", "any"))
    add("--send", type=float)
    add("--send-rerouted", type=float)
    add("--allreduce", type=float)
    add("--speed", nargs="+", metavar="D.S=0.8", help="slow or fast workers")
    add("--what-if", action="store_true", help="a table with one row for every worker that could die next")
    add("--bytes", type=float, help="of one micro-batch in flight on a worker, for --what-if")
    add("--capacity", type=float, help="bytes that a worker has for micro-batches in flight, for --what-if")
    return parser


def _problem(arguments: argparse.Namespace) -> Problem:
    """The problem of the file and the flags."""
    keys: dict[str, Any] = {}
    if arguments.problem:
        try:
            keys = json.loads(Path(arguments.problem).read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{arguments.problem}: not JSON ({error})") from None
        if not isinstance(keys, dict):
            raise ValueError(f"{arguments.problem}: a problem is an object with keys")
        keys = keys.get("problem", keys)  # a plan file is a problem, too
    plain = ("pipelines", "stages", "microbatches", "backward", "optimizer", "reroute", "send", "send_rerouted")
    for name in (*plain, "allreduce"):
        if getattr(arguments, name) is not None:
            keys[name] = getattr(arguments, name)
    if arguments.fail is not None:
        keys["failed"] = [list(_worker("--fail", text)) for item in arguments.fail for text in item.split(",")]
    if arguments.durations:
        keys["durations"] = dict(_pair("--durations", item) for item in arguments.durations.split(","))
    if arguments.memory:
        keys["memory_limit"] = _memory(arguments.memory)
    if arguments.speed:
        pairs = [_pair("--speed", item) for item in arguments.speed]
        keys["speed"] = {"{},{}".format(*_worker("--speed", key)): value for key, value in pairs}
    return Problem.from_json(keys)


def _check(arguments: argparse.Namespace) -> None:
    """What would otherwise be noticed only after the search."""
    if not arguments.seconds >= 0:
        raise ValueError(f"--seconds: {arguments.seconds:g} is not a time")
    for name in ("bytes", "capacity"):
        if getattr(arguments, name) is not None and not getattr(arguments, name) > 0:
            raise ValueError(f"--{name}: {getattr(arguments, name):g} is not above 0")
    if arguments.capacity is not None and arguments.bytes is None:
        raise ValueError("--capacity: --bytes is needed, too, the size of one micro-batch in flight")
    for name in ("out", "csv"):
        folder = Path(getattr(arguments, name) or ".").parent
        if not folder.is_dir():
            raise ValueError(f"--{name}: there is no folder {folder}")


def _worker(flag: str, text: str) -> Worker:
    try:
        return Worker.parse(text)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None


def _pair(flag: str, text: str) -> tuple[str, Any]:
    """KEY=NUMBER, or KEY=NUMBER/NUMBER/... for one per stage."""
    key, _, value = text.partition("=")
    try:
        numbers = [float(x) for x in value.split("/")]
    except ValueError:
        raise ValueError(f"{flag}: {text!r} is not of the form KEY=NUMBER") from None
    return key.strip(), numbers if len(numbers) > 1 else numbers[0]


def _memory(text: str) -> Any:
    try:
        if text == "none":
            return None
        if text.startswith("1f1b"):
            return {"base": "1f1b", "extra": int(text[4:] or 0)}
        limits = [None if x == "none" else int(x) for x in text.split("/")]
    except ValueError:
        raise ValueError(f"--memory: {text!r} is not none, a number, one per stage (4/3/6/1), or 1f1b+k") from None
    return limits if len(limits) > 1 else limits[0]


def _search(problem: Problem, seconds: float) -> Plan:
    """The best plan within the time, with a line that shows how it gets better; Ctrl-C ends it early."""
    begin, said = time.perf_counter(), 0.0
    best = None
    try:
        for best in plans(problem):
            spent = time.perf_counter() - begin
            if spent >= seconds:
                break
            if sys.stderr.isatty() and spent - said > 0.5:
                said = spent
                now = best()
                print(
                    f"\r{spent:6.1f} s of {seconds:g}: {now.value:g}, bound {now.lower_bound:g} ",
                    end="",
                    file=sys.stderr,
                )
    except KeyboardInterrupt:
        if best is None:
            raise
        print("\nstopped; this is the best plan so far", file=sys.stderr)
    if said:
        print(file=sys.stderr)
    assert best is not None
    return best()


def _show_deaths(console: Console, problem: Problem, arguments: argparse.Namespace) -> None:
    """The --what-if table."""
    terminal = sys.stderr.isatty()

    def progress(done: int, total: int) -> None:
        if terminal:
            print(f"\r{done} of {total} ", end="" if done < total else "\n", file=sys.stderr)

    seconds = min(arguments.seconds, 0.1)
    table = what_if(
        problem, seconds=seconds, microbatch_bytes=arguments.bytes, capacity=arguments.capacity, progress=progress
    )
    console.print(_grid(table, arguments.capacity))
    stages = f"stage {table.thinnest} has the least redundancy left: {table.left} of {problem.pipelines} workers live"
    console.print(f"now {table.now.value:g} {arguments.unit} a step; {stages}")


def _grid(table: Table, capacity: float | None) -> Grid:
    grid = Grid(box=None, padding=(0, 2, 0, 0))
    for name in ("dies next", "period", "slowdown", "fullest peer", "in flight", "limit", "bytes", "fits"):
        grid.add_column(name, justify="left" if name in ("dies next", "fits") else "right")
    for row in table.rows:
        if row.period is None:
            grid.add_row(str(row.worker), "none", "-", "-", "-", "-", "-", "no: its stage is gone")
            continue
        size = "-" if row.bytes is None else f"{row.bytes:.3g}" + (f" of {capacity:.3g}" if capacity else "")
        cells = (
            f"{row.period:g}",
            f"{100 * (row.slowdown or 0):+.1f} %",
            str(row.peer),
            f"{row.peak:g}",
            f"{row.limit:g}",
        )
        grid.add_row(str(row.worker), *cells, size, "yes" if row.fits else "no")
    return grid


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}"
    return str(error)


if __name__ == "__main__":
    sys.exit(main())
