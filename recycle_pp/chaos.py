"""Kills, hangs and pauses workers of a live job, to see whether it can be trusted.

    torchrun --nproc-per-node=12 -m recycle_pp.train run.dir=runs/mine run.steps=2000 run.respawns=100000
    python -m recycle_pp.chaos --run-dir runs/mine --mtbf 5s --until-step 1500 --seed 7      # in another terminal

It reads who lives from the run's events, strikes processes on this machine (one strike every --mtbf on average, at
random instants; or at the times of --trace), and ends with the job, at --until-step or at a Ctrl-C, with a table:
deaths, stalls, steps, and the goodput (the share of a run without deaths that was got done). It leaves a member of
every stage alone, unless --cruel. The same seed draws the same times; who lives then, and where in a step, is chance.

--trace: a CSV file with a header; the first column is a time (in hours, minutes or seconds, as its header says), the
second one how many workers are up from then on. Where the number falls, so many are struck; --speed 60 makes a minute a
second.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import random
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recycle_pp.telemetry.run_folder import RunFolder

KINDS = {
    "kill": "SIGKILL",
    "hang": "SIGSTOP, until the job notices and kills it",
    "pause": "SIGSTOP for a fraction of a second",
    "evict": "SIGTERM: the worker hands over and leaves",
}
SHARES = {"kill": 7, "hang": 1, "pause": 1, "evict": 1}
_POLL = 0.02  # seconds between looks at the run folder


@dataclass
class Live:
    """What the events of a run say about its processes on this machine."""

    run: RunFolder
    pids: dict[str, int] = field(default_factory=dict)  # worker -> its process
    members: set[str] = field(default_factory=set)  # those that take part, rather than still catching up
    over: bool = False
    _begun: bool = False
    _read: int = 0

    def look(self) -> None:
        events = self.run.lines(self.run.events)
        for event in events[self._read :]:
            name, worker = event["event"], event["worker"]
            if name == "spawned" and event.get("host") == socket.gethostname():
                self.pids[worker] = event["pid"]
            if name == "rejoined" or (name == "spawned" and not self._begun):
                self.members.add(worker)
            elif name in ("death_detected", "left"):
                self.struck(worker)
            elif name == "restored":  # roles have changed, and all begin anew
                self.pids.clear()
                self.members.clear()
            if name in ("plan_adopted", "restored"):
                self._begun = name == "plan_adopted"
            if name in ("finished", "stopped", "spawned"):  # a resume goes on in the same folder
                self.over = name != "spawned"
        self._read = len(events)

    def struck(self, worker: str) -> None:
        self.pids.pop(worker, None)
        self.members.discard(worker)

    def steps(self) -> int:
        return max((line["step"] + 1 for line in self.run.lines(self.run.metrics)), default=0)

    def victims(self, cruel: bool) -> list[str]:
        """Workers that may be struck: by default never the last member of a stage."""
        stages = [_stage(worker) for worker in self.members]
        return sorted(w for w in self.pids if cruel or w not in self.members or stages.count(_stage(w)) > 1)


def _stage(worker: str) -> str:
    return worker.partition(".")[2]


def main(arguments: Sequence[str]) -> int:
    try:
        options = _options(arguments)
        run = RunFolder(options.run_dir)
        if not run.events.exists():
            raise ValueError(f"--run-dir {options.run_dir} holds no run: there is no {run.events.name}")
        times = _times_of(options.trace, options.speed) if options.trace else _at_random(options.mtbf, options.seed)
    except ValueError as error:
        print(f"recycle_pp.chaos: {error}", file=sys.stderr)
        return 2
    live, begun = Live(run), time.time()
    with suppress(KeyboardInterrupt):
        strike(live, times, random.Random(options.seed), options)
    print(table(run, begun))
    return 0


def strike(live: Live, times: Iterator[float], rng: random.Random, options: argparse.Namespace) -> None:
    """Strikes at `times` (seconds from now) until the job ends, or has done `options.until_step` steps."""
    begun, due = time.monotonic(), next(times, None)
    while due is not None:
        live.look()
        if live.over or (options.until_step is not None and live.steps() >= options.until_step):
            return
        if time.monotonic() - begun < due:
            time.sleep(_POLL)
            continue
        due = next(times, None)
        victims = live.victims(options.cruel)
        if victims:
            kind = rng.choices(options.kinds, [SHARES[kind] for kind in options.kinds])[0]
            victim = rng.choice(victims)
            _hit(kind, live.pids[victim], rng)
            print(f"{time.monotonic() - begun:8.2f} s  {kind:<6} worker {victim}", flush=True)
            if kind != "pause":
                live.struck(victim)


def _hit(kind: str, pid: int, rng: random.Random) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, {"kill": signal.SIGKILL, "evict": signal.SIGTERM}.get(kind, signal.SIGSTOP))
        if kind == "pause":
            time.sleep(rng.uniform(0.05, 0.5))
            os.kill(pid, signal.SIGCONT)


# ------------------------------------------------------------------------------------------------------------ times


def _at_random(mtbf: float, seed: int) -> Iterator[float]:
    """A Poisson process."""
    rng, now = random.Random(f"times {seed}"), 0.0
    while True:
        now += rng.expovariate(1 / mtbf)
        yield now


def _times_of(path: str, speed: float) -> Iterator[float]:
    """One time for every worker that a trace loses; ValueError for a file that is none."""
    try:
        with Path(path).open(newline="") as file:
            rows = list(csv.reader(file))
        header, body = rows[0], rows[1:]
        unit = {"hour": 3600.0, "minute": 60.0, "second": 1.0}[header[0].strip().rstrip("s")]
        points = [(unit * float(row[0]), int(float(row[1]))) for row in body if row]
    except (OSError, ValueError, LookupError) as error:
        raise ValueError(f"--trace {path} must be a CSV of hours (minutes, seconds) and workers: {error}") from error
    falls = [
        (at - points[0][0]) / speed
        for (_, before), (at, after) in itertools.pairwise(points)
        for _ in range(max(0, before - after))
    ]
    return iter(falls)


# ------------------------------------------------------------------------------------------------------------ table


def table(run: RunFolder, since: float = 0.0) -> str:
    """What the run went through since that time, in words and numbers."""
    events = [e for e in run.lines(run.events) if e["time"] >= since]
    stalls = sorted(e["stall_seconds"] for e in events if e["event"] == "resumed")
    metrics = run.lines(run.metrics)
    causes: dict[str, int] = {}
    for event in events:
        if event["event"] == "death_detected":
            causes[event["cause"]] = causes.get(event["cause"], 0) + 1
    rows: list[tuple[str, Any]] = [
        ("deaths", sum(causes.values())),
        *((f"  {cause}", count) for cause, count in sorted(causes.items())),
        ("came back", sum(e["event"] == "rejoined" for e in events)),
        ("restored from a checkpoint", sum(e["event"] == "restored" for e in events)),
        ("recoveries", len(stalls)),
        ("stall, median", f"{1000 * _quantile(stalls, 0.5):.0f} ms"),
        ("stall, 99 %", f"{1000 * _quantile(stalls, 0.99):.0f} ms"),
        ("longest stall", f"{1000 * _quantile(stalls, 1.0):.0f} ms"),
        ("steps committed", len({line["step"] for line in metrics})),
        ("goodput", f"{100 * _goodput(metrics):.0f} % of an undisturbed run"),
        ("per live worker", f"{100 * _goodput(metrics, per_worker=True):.0f} %"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _goodput(metrics: Sequence[dict[str, Any]], per_worker: bool = False) -> float:
    """Time that the steps would have taken (each the median of those with all workers), over what they took."""
    steps = [line for line in metrics[1:] if line.get("step_seconds")]  # the first one holds the start
    most = max((line["live_workers"] for line in steps), default=0)
    full = sorted(line["step_seconds"] for line in steps if line["live_workers"] == most)
    if not full:
        return 0.0
    best = _quantile(full, 0.5)
    took = sum(line["step_seconds"] * (line["live_workers"] / most if per_worker else 1.0) for line in steps)
    return best * len(steps) / took


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


# ---------------------------------------------------------------------------------------------------------- options


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    """ValueError where a value is none; `--help` and unknown options end the process as argparse does."""
    parser = argparse.ArgumentParser(
        prog="python -m recycle_pp.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run-dir", required=True, help="the run folder of a live job on this machine")
    parser.add_argument("--mtbf", default="10s", help="mean time between strikes: 500ms, 5s, 2m (default 10s)")
    parser.add_argument("--until-step", type=int, help="stop striking after so many steps (default: at the job's end)")
    parser.add_argument("--seed", type=int, default=0, help="of the victims, kinds and times")
    parser.add_argument("--kinds", default="kill", help=f"some of {', '.join(KINDS)}, comma-separated, or all")
    parser.add_argument("--cruel", action="store_true", help="strike the last worker of a stage, too")
    parser.add_argument("--trace", help="CSV file of times, instead of --mtbf")
    parser.add_argument("--speed", type=float, default=1.0, help="how many times faster than the trace")
    options = parser.parse_args(list(arguments))
    options.mtbf = _seconds(options.mtbf)
    options.kinds = list(KINDS) if options.kinds == "all" else options.kinds.split(",")
    for kind in options.kinds:
        if kind not in KINDS:
            raise ValueError(f"--kinds must be some of {', '.join(KINDS)}, or all, not {kind!r}")
    if options.speed <= 0:
        raise ValueError(f"--speed must be above 0, not {options.speed}")
    return options


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h)?", text)
    seconds = float(match[1]) * {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}[match[2] or "s"] if match else 0.0
    if seconds <= 0:
        raise ValueError(f"--mtbf must be a time above 0 like 500ms, 5s or 2m, not {text!r}")
    return seconds


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
