"""Stall of a large emulated job when one worker, ten workers or a node of eight die at once, by job size.

    python bench/large.py [--shapes 3x4 6x8 12x8] [--op 0.24] [--microbatches 6] [--times 3] [SETTING ...]

All workers are processes on this machine, forked from one that has imported everything. Their ops sleep for `--op`
seconds. Between faults, 96 workers run up to 400 ops a second at 0.24 s. A recovery keeps two cores busy, so its times
are upper bounds. A fault is SIGKILL to all its victims, at a random instant of a step. Ten random victims leave each
stage at least one worker. A node is eight workers with consecutive ranks. The next fault follows when all workers are
back. Columns:

    stall    ms from the kill until the last survivor that had to wait has started its next op; median, largest
    planned  ms from the kill until the rest of the step was planned; median
    regroups new generations until the rest was planned; more than one if the deaths were not detected together
    step     duration in s of a step without a death; median
    broken   duration of the step with the deaths, as a multiple of `step`; median
    back     s from the kill until all workers take part again; median

The results are also in bench/out/large.json.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from results import save

from recycle_pp.chaos import Live
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.testing.local_cluster import Zygote

COMMON = ["emulate=sleep", "model=tiny", "run.steps=100000", "run.validate_every=0", "run.respawns=1000"]
STEADY = 5  # steps before the first fault
PATIENCE = 300.0  # maximum seconds of a wait
NODE = 8  # workers
Json = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["3x4", "6x8", "12x8"], help="pipelines x stages")
    parser.add_argument("--op", type=float, default=0.24, help="seconds of F, I and W; O takes three times as long")
    parser.add_argument("--microbatches", type=int, default=6)
    parser.add_argument("--times", type=int, default=3, help="faults of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("overrides", nargs="*", default=[])
    given = parser.parse_args()
    print(
        f"{'workers':>7} {'dead':>5} {'stall':>15} {'planned':>8} {'regroups':>9} {'step':>6} {'broken':>7} {'back':>6}"
    )
    rows = []
    with Zygote() as zygote:
        for shape in given.shapes:
            rows += measured(zygote, shape, given)
    save("large.json", rows)


def measured(zygote: Zygote, shape: str, given: argparse.Namespace) -> list[Json]:
    """Prints and returns a row for each kind of fault."""
    pipelines, stages = map(int, shape.split("x"))
    durations = [f"emulate.{kind}={given.op}" for kind in "FIW"] + [f"emulate.O={3 * given.op}"]
    arguments = [*COMMON, *durations, f"parallel={shape}", f"parallel.microbatches={given.microbatches}"]
    rng, rows = random.Random(given.seed), list[Json]()
    with tempfile.TemporaryDirectory(prefix="recycle-large-") as folder:
        run = RunFolder(Path(folder) / "run")
        with zygote.run([*arguments, f"model.layers={stages}", *given.overrides, f"run.dir={run.path}"]):
            live = Live(run)
            for victims in (one, ten, node):
                faults = [fault(live, victims(pipelines, stages, rng), rng) for _ in range(given.times)]
                rows.append(row(pipelines * stages, faults))
    return rows


def one(pipelines: int, stages: int, rng: random.Random) -> list[str]:
    return [f"{rng.randrange(pipelines)}.{rng.randrange(stages)}"]


def ten(pipelines: int, stages: int, rng: random.Random) -> list[str]:
    """Ten workers, or as many as can die while each stage keeps one."""
    kept = {f"{rng.randrange(pipelines)}.{s}" for s in range(stages)}
    rest = [name for d in range(pipelines) for s in range(stages) if (name := f"{d}.{s}") not in kept]
    return rng.sample(rest, min(10, len(rest)))


def node(pipelines: int, stages: int, rng: random.Random) -> list[str]:
    first = NODE * rng.randrange(pipelines * stages // NODE)
    return [f"{rank // stages}.{rank % stages}" for rank in range(first, first + NODE)]


def fault(live: Live, victims: list[str], rng: random.Random) -> Json:
    """Kills the victims together, and waits until all workers are back. Returns the measurements."""
    run = live.run
    workers = len(run_workers(live))
    before = live.steps()
    until(lambda: live.steps() >= max(before + 2, STEADY), live)
    usual = statistics.median(usual_steps(run, workers))
    time.sleep(rng.random() * usual)
    pids = [live.pids[victim] for victim in victims]
    at, clock, committed = time.time(), time.monotonic(), live.steps()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    until(lambda: len(live.members) < workers, live)
    until(lambda: len(live.members) == workers, live)
    back = time.time() - at
    until(lambda: live.steps() > committed + 1, live)
    resumed = [e for e in run.lines(run.events) if e["event"] == "resumed" and e["time"] > at]
    broken = {e["step"] for e in resumed}
    lines = [line for line in run.lines(run.metrics) if line["step"] in broken]
    assert {name for e in resumed for name in e["dead"]} >= set(victims), (victims, resumed)
    return {
        "victims": victims, "usual": usual, "back": back, "regroups": len(resumed),
        "stall": max(e["died_at"] + e["stall_seconds"] for e in resumed) - clock,
        "planned": max(e["died_at"] + e["phases"]["planned"] for e in resumed) - clock,
        "broken": sum(line["step_seconds"] for line in lines) / usual - (len(lines) - 1),
    }  # fmt: skip


def run_workers(live: Live) -> set[str]:
    """All workers of the job, once all are members."""
    until(lambda: live.steps() >= 1, live)
    return {e["worker"] for e in live.run.lines(live.run.events) if e["event"] == "spawned"}


def usual_steps(run: RunFolder, workers: int) -> list[float]:
    """Seconds of the steps with all workers, without the first ones and those with a death or a return."""
    touched = {
        e["step"] + k for e in run.lines(run.events) if e["event"] in ("resumed", "rejoined") for k in (-1, 0, 1)
    }
    lines = [line for line in run.lines(run.metrics)[2:] if line["live_workers"] == workers]
    return [line["step_seconds"] for line in lines if line["step"] not in touched]


def row(workers: int, faults: list[Json]) -> Json:
    of = {key: [each[key] for each in faults] for key in faults[0]}
    middle = {key: statistics.median(of[key]) for key in ("stall", "planned", "regroups", "usual", "broken", "back")}
    stall = f"{1e3 * middle['stall']:.0f} ({1e3 * max(of['stall']):.0f})"
    print(
        f"{workers:>7} {len(of['victims'][0]):>5} {stall:>15} {1e3 * middle['planned']:>8.0f} {middle['regroups']:>9g} "
        f"{middle['usual']:>6.2f} {middle['broken']:>7.2f} {middle['back']:>6.1f}",
        flush=True,
    )
    return {"workers": workers, "faults": faults, "load": os.getloadavg()[0]}


def until(true: Callable[[], bool], live: Live) -> None:
    deadline = time.monotonic() + PATIENCE
    live.update()
    while not true():
        if live.over or time.monotonic() > deadline:
            raise SystemExit("the job has ended" if live.over else f"nothing happened for {PATIENCE:.0f} s")
        time.sleep(0.02)
        live.update()


if __name__ == "__main__":
    main()
