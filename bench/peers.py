"""Compares recycle_pp with torchft and with restarts from a checkpoint, on the same pipeline with the same deaths.

    python bench/peers.py [--jobs recycle_pp torchft ...] [--cases free one 60 15 5] [--seconds 180] [--rounds 1]
                          [--seed 1] [--add] [--pictures docs/pictures]

Twelve processes train three pipelines of four stages with 6 micro-batches each. Messages and gradients are real and
have the size of `model=small`; ops sleep (20 ms for F, I and W, 60 ms for O), so two cores can stand for twelve GPUs.
The script installs torchft from PyPI into an environment in bench/out/torchft, with the same torch version as here.
Jobs:

- recycle_pp: the defaults, under torchrun. recycle_pp-1f1b: with torch's schedule, `schedule=coupled`.
- torchft: torch's `Schedule1F1B`, and a replica group per pipeline. If a worker dies, its group restarts and heals.
- restart: torch's `Schedule1F1B` with a checkpoint every 30 s. All workers restart from the newest checkpoint.
- -warm: all processes are forked from one that has imported everything. For jobs without this suffix, torchrun starts
  new interpreters. During their imports these share this machine's cores, unlike those of a cluster.

Cases: `free` has no deaths. `one` has deaths one by one, each after the job has recovered. A number N has one death at
a random moment of each interval of N seconds. All jobs of a case get the same list of times and workers. If a worker
must not die, because only it or its group has the newest state, the next one dies instead. Workers of torchft and
restart that are still importing are not killed, so there are fewer deaths if all are importing. This favours these
jobs.

A job's rate is the number of samples per second in steps that are committed for the first time, from its metrics or
from the events of its workers. *share*: the rate, as a share of the rate if all steps took as long as the median step
with all workers in the same run, without the steps near a kill. So a different load of the machine in another run does
not count. *lost*: seconds of such work lost per death. *gap*: the longest time between two commits. *full*: the median
time from the kill to the first step with all twelve workers.

`peer_jobs.py` starts the jobs, `peer_worker.py` is the worker of the peers, without recycle_pp.

The folders in bench/out/peers contain the raw events, bench/out/peers.json contains all commits and kills. With --add,
the table and the picture include the earlier results. Combine it with a different --seed, or with jobs or cases that
were not measured. `--add --cases` without a case only prints and draws the earlier results.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from peer_jobs import JOBS, WORKERS, Commit, Job, Recycle, Setup

OUT = Path(__file__).parent / "out"
TORCHFT = "torchft==0.2.0"
STARTED, PATIENCE = 300.0, 120.0  # maximum seconds until all workers take part, at the start and after a death
# whether the job is recycle_pp's -> seconds before the first death, while standby processes import modules
SETTLE = {True: 20.0, False: 2.0}
STEADY = 5  # steps with all workers that come before each death
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--cases", nargs="*", default=["free", "one", "60", "15", "5"])
    parser.add_argument("--seconds", type=float, default=180.0, help="duration of a numbered case; half for `free`")
    parser.add_argument("--deaths", type=int, default=6, help="deaths in the case `one`")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--slot", type=float, default=0.02, help="seconds of F, I and W")
    parser.add_argument("--checkpoint", type=float, default=30.0, help="seconds between two checkpoints")
    parser.add_argument("--add", action="store_true", help="keep the results of earlier calls")
    parser.add_argument("--environment", type=Path, default=OUT / "torchft", help="torchft; created if missing")
    parser.add_argument("--pictures", type=Path, default=OUT)
    given = parser.parse_args()
    setup = Setup(given.slot, given.checkpoint, given.environment / "bin" / "python")
    if any(name.startswith("torchft") for name in given.jobs):
        make_environment(given.environment)
    results = OUT / "peers.json"
    rows: list[Row] = json.loads(results.read_text())["rows"] if given.add else []
    for number in range(given.rounds):
        for case in given.cases:
            for name in given.jobs:
                folder = OUT / "peers" / f"{case}-{name}-{given.seed + number}"
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                rows.append(
                    {"job": name, "case": case, **measure(name, case, setup, folder, given, given.seed + number)}
                )
                arguments = {key: str(value) for key, value in vars(given).items()}
                results.write_text(json.dumps({"rows": rows, "arguments": arguments}, indent=1))
    table = summary(rows)
    show(table)
    picture(table, given.pictures / "peers.svg")


def make_environment(folder: Path) -> None:
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        torch = f"torch=={version('torch').partition('+')[0]}"
        subprocess.run([python, "-m", "pip", "install", "--quiet", torch, TORCHFT], check=True)


# ---------------------------------------------------------------------------------------------------------- one job


def measure(name: str, case: str, setup: Setup, folder: Path, given: argparse.Namespace, seed: int) -> Row:
    rng, kills = random.Random(f"{case} {seed}"), list[Row]()
    with JOBS[name](setup, folder) as job:
        until(job, lambda: steady(job), STARTED)
        wait(job, SETTLE[isinstance(job, Recycle)])
        until(job, lambda: steady(job), STARTED)
        begin = next_commit(job, PATIENCE)
        if case == "free":
            wait(job, given.seconds / 2)
        elif case == "one":
            for _ in range(given.deaths):
                until(job, lambda: steady(job), PATIENCE)
                next_commit(job, PATIENCE)
                wait(job, rng.random() * 30 * setup.slot)
                kills.append(kill(job, rng.randrange(len(WORKERS))))
                seen = len(job.commits)
                until(job, lambda seen=seen: len(job.commits) > seen + 1, PATIENCE)  # type: ignore[misc]
            until(job, lambda: steady(job), PATIENCE)
        else:
            for interval in range(int(given.seconds / float(case))):
                due, index = float(case) * (interval + rng.random()), rng.randrange(len(WORKERS))
                wait(job, begin + due - time.time())
                kills.append(kill(job, index))
            wait(job, begin + given.seconds - time.time())
        end = next_commit(job, 10.0)
    (folder / "kills.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in kills))
    row = {"kills": kills, "commits": job.commits, "begin": begin, "end": end, "load": os.getloadavg()[0]}
    rate = rate_of(row)
    print(f"{case}, {name}: {rate:.1f} samples/s, {len(kills)} deaths, load {row['load']:.1f}", file=sys.stderr)
    return row


def steady(job: Job) -> bool:
    return len(job.commits) > STEADY and all(commit.full for commit in job.commits[-STEADY:])


def until(job: Job, true: Callable[[], bool], seconds: float) -> None:
    deadline = time.time() + seconds
    while not true():
        if job.over or time.time() > deadline:
            log = "\n".join((job.folder / "log").read_text(errors="replace").splitlines()[-20:])
            raise SystemExit(f"the job of {job.folder} {'ended' if job.over else f'waited for {seconds} s'}:\n{log}")
        time.sleep(0.01)
        job.update()


def wait(job: Job, seconds: float) -> None:
    end = time.time() + seconds
    until(job, lambda: time.time() >= end, seconds + PATIENCE)


def next_commit(job: Job, seconds: float) -> float:
    """Waits for a commit for at most `seconds`. Returns its time, or the time now if there was none."""
    job.update()
    seen, deadline = len(job.commits), time.time() + seconds
    until(job, lambda: len(job.commits) > seen or time.time() > deadline, seconds + PATIENCE)
    return job.commits[seen].time if len(job.commits) > seen else time.time()


def kill(job: Job, drawn: int) -> Row:
    """Kills the drawn worker, or the next one that may die. Returns a line of kills.jsonl."""
    job.update()
    may = job.victims()
    for worker in [*WORKERS[drawn:], *WORKERS[:drawn]]:
        if worker in may:
            with suppress(ProcessLookupError):
                at, pid = time.time(), job.pids[worker]
                os.kill(pid, signal.SIGKILL)
                job.killed(worker)
                return {"time": at, "worker": worker, "pid": pid, "drawn": WORKERS[drawn]}
    return {"time": time.time(), "worker": None, "pid": None, "drawn": WORKERS[drawn]}


# ---------------------------------------------------------------------------------------------------------- figures


def rate_of(row: Row) -> float:
    """Samples per second in the newly committed steps of a measurement."""
    done = sum(Commit(*commit).samples for commit in row["commits"] if row["begin"] < commit[0] <= row["end"])
    return float(done / (row["end"] - row["begin"]))


def share_of(row: Row) -> float:
    """The rate, as a share of the rate of the run's own median step with all workers."""
    commits, kills = [Commit(*commit) for commit in row["commits"]], [kill["time"] for kill in row["kills"]]
    usual = statistics.median(
        b.time - a.time
        for a, b in pairwise(commits)
        if a.full and b.full and not any(a.time - 1 < at < b.time for at in kills)
    )
    return rate_of(row) * usual / max(commit.samples for commit in commits)


def summary(rows: list[Row]) -> list[Row]:
    """A row per case and job: medians over the rounds, all deaths of all rounds together."""
    found: list[Row] = []
    for case, name in dict.fromkeys((row["case"], row["job"]) for row in rows):
        mine = [row for row in rows if (row["case"], row["job"]) == (case, name)]
        rate, share = (statistics.median(map(of, mine)) for of in (rate_of, share_of))
        deaths = sum(kill["worker"] is not None for row in mine for kill in row["kills"])
        lost = sum((1 - share_of(row)) * (row["end"] - row["begin"]) for row in mine) / deaths if deaths else None
        back = [entry for row in mine for entry in full_again(row)]
        found.append({
            "case": case, "job": name, "rate": rate, "share": share, "deaths": deaths, "lost": lost,
            "gap": max(map(gap_of, mine)), "full": statistics.median(back) if back else None,
            "load": statistics.median(row["load"] for row in mine),
        })  # fmt: skip
    return found


def gap_of(row: Row) -> float:
    times = [at for at, *_ in row["commits"] if row["begin"] <= at <= row["end"]]
    return max((b - a for a, b in pairwise([row["begin"], *times, row["end"]])), default=0.0)


def full_again(row: Row) -> list[float]:
    """Seconds from each kill to the first full step that no smaller step follows before the next kill."""
    commits, found = [Commit(*commit) for commit in row["commits"]], []
    for n, kill in enumerate(row["kills"]):
        end = row["kills"][n + 1]["time"] if n + 1 < len(row["kills"]) else row["end"]
        after = [commit for commit in commits if kill["time"] < commit.time <= end]
        smaller = max((k for k, commit in enumerate(after) if not commit.full), default=-1)
        found += [after[smaller + 1].time - kill["time"]] if smaller + 1 < len(after) else []
    return found


def show(table: list[Row]) -> None:
    columns = {"rate": "samples/s", "share": "share", "deaths": "deaths", "lost": "lost s", "gap": "gap s"}
    columns |= {"full": "full s", "load": "load"}
    print(f"{'deaths':<8}{'job':<20}" + "".join(f"{title:>11}" for title in columns.values()))
    for row in table:
        print(f"{row['case']:<8}{row['job']:<20}" + "".join(f"{text(row[key]):>11}" for key in columns))


def text(value: float | int | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.3g}" if value < 1 else f"{value:.2f}"


def picture(table: list[Row], path: Path) -> None:
    """Bars: the rate of each job, by case."""
    cases, jobs = (list(dict.fromkeys(row[key] for row in table)) for key in ("case", "job"))
    titles = {"free": "no death", "one": "single deaths"}
    with matplotlib.rc_context({"font.size": 8, "svg.fonttype": "none", "svg.hashsalt": "recycle_pp"}):
        figure = Figure(figsize=(7.2, 2.8), layout="constrained")
        axes = figure.add_subplot()
        for n, name in enumerate(jobs):
            rates = {row["case"]: row["rate"] for row in table if row["job"] == name}
            places = [k + (n - (len(jobs) - 1) / 2) * 0.8 / len(jobs) for k, case in enumerate(cases) if case in rates]
            axes.bar(places, list(rates.values()), 0.76 / len(jobs), label=name)
        axes.set_xticks(range(len(cases)), [titles.get(case, f"a death every {case} s") for case in cases])
        axes.set_ylabel("samples/s in committed steps")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(ncols=len(jobs), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=7)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
