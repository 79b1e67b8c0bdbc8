"""Compares the loss curves of a job with thousands of deaths and an undisturbed one, on real text with real compute.

    python bench/curve.py [--failures 2000] [--every 2] [--seed 1] [--pictures docs/pictures] [SETTING ...]

Two jobs of twelve workers (3 x 4) train `model=small` on the sources of Python's standard library, with exact sums.
They run at the same time, so their speeds mean nothing. One has no deaths. In the other a random worker gets SIGKILL
every `--every` seconds, `--failures` times in all. A worker is not killed while it is the last member of its stage.
Killed workers are forked from a process that has already imported everything, so they need not import torch on this
machine's cores. No checkpoint is read.

A short job before both determines the number of steps, so that the two jobs take about `--failures` times `--every`
seconds. If they end earlier, there are fewer deaths. The table shows the losses at ten steps and the sha256 of all
final weights, which must be equal. The folders in bench/out/curve contain the raw events, bench/out/curve.json contains
both curves and all kills.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from recycle_pp.chaos import Live
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.telemetry.run_reader import RunReader
from recycle_pp.testing.local_cluster import LocalJob, Zygote

OUT = Path(__file__).parent / "out"
COMMON = [
    "parallel=3x4", "model=small", "numerics.reproducible=true", "run.respawns=1000000", "run.validate_every=0",
    "optimizer.schedule=constant", "control.suspicion=30",
]  # fmt: skip
CALIBRATION = 40  # steps
SHARE = 1.6  # lower bound on the ratio of step times with both jobs and with one job alone (measured: 1.7 to 2.2)
STARTED = 300.0  # maximum seconds until the job has started
Json = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--failures", type=int, default=2000)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two deaths")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pictures", type=Path, default=OUT)
    parser.add_argument("overrides", nargs="*", default=[])
    given = parser.parse_args()
    with Zygote() as zygote:
        (begin,) = train(zygote, ["calibration"], CALIBRATION, given)
        step = statistics.median(begin["step_seconds"][CALIBRATION // 2 :])
        steps = max(CALIBRATION, round(given.failures * given.every / step / SHARE))
        undisturbed, disturbed = train(zygote, ["undisturbed", "disturbed"], steps, given)
    arguments = {key: str(value) for key, value in vars(given).items()}
    (OUT / "curve.json").write_text(json.dumps({"jobs": [undisturbed, disturbed], "arguments": arguments}))
    table(undisturbed, disturbed)
    picture(undisturbed, disturbed, given.pictures / "curve.svg")


def train(zygote: Zygote, names: list[str], steps: int, given: argparse.Namespace) -> list[Json]:
    """Runs jobs side by side to their ends. Kills workers of the disturbed one only."""
    kills: dict[str, list[Json]] = {name: [] for name in names}
    with ExitStack() as stack:
        jobs = {}
        for name in names:
            folder = OUT / "curve" / name
            shutil.rmtree(folder, ignore_errors=True)
            arguments = [*COMMON, *given.overrides, f"run.steps={steps}", f"run.dir={folder}"]
            jobs[name] = stack.enter_context(zygote.run(arguments))
        if "disturbed" in jobs:
            kills["disturbed"] = disturb(jobs["disturbed"], given)
        for name, job in jobs.items():
            if code := job.wait(10 * given.failures * given.every + STARTED):
                raise SystemExit(f"{name}: exit code {code}\n{job.output[-3000:]}")
    return [results(name, kills[name]) for name in names]


def results(name: str, kills: list[Json]) -> Json:
    run = RunFolder(OUT / "curve" / name)
    lines, summary = RunReader(run).steps(), json.loads(run.summary.read_text())
    print(f"{name}: {len(lines)} steps, {len(kills)} deaths, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    return {
        "name": name, "kills": kills, "sha256": summary["weights_sha256"], "deaths": summary["deaths"],
        "losses": [line.loss for line in lines], "step_seconds": [line.step_seconds for line in lines],
        "times": [line.time for line in lines], "events": [event["event"] for event in run.lines(run.events)],
    }  # fmt: skip


def disturb(job: LocalJob, given: argparse.Namespace) -> list[Json]:
    """Kills a random worker every `every` seconds, until there have been enough deaths or the job has ended."""
    job.wait_for_event("plan_adopted", STARTED)
    live, rng, kills = Live(job.run), random.Random(given.seed), list[Json]()
    due = time.time()
    while len(kills) < given.failures:
        due += given.every
        time.sleep(max(0.0, due - time.time()))
        live.update()
        if live.over:
            break
        victims = live.victims(cruel=False)
        if not victims:
            continue
        worker = rng.choice(victims)
        with suppress(ProcessLookupError):
            os.kill(live.pids[worker], signal.SIGKILL)
            kills.append({"time": time.time(), "worker": worker, "pid": live.pids[worker], "step": live.steps()})
            live.remove(worker)
    return kills


def table(undisturbed: Json, disturbed: Json) -> None:
    steps = len(undisturbed["losses"])
    print(f"{steps} steps; {len(disturbed['kills'])} kills, {disturbed['deaths']} deaths by the job's own count")
    print(f"{'step':>8}{'undisturbed':>14}{'with deaths':>14}{'deaths before':>15}")
    for step in sorted({round(k * (steps - 1) / 9) for k in range(10)}):
        before = sum(kill["step"] <= step for kill in disturbed["kills"])
        print(f"{step:>8}{undisturbed['losses'][step]:>14.6f}{disturbed['losses'][step]:>14.6f}{before:>15}")
    equal = sum(a == b for a, b in zip(undisturbed["losses"], disturbed["losses"], strict=True))
    print(f"{equal} of {steps} losses are equal in all digits; restores: {disturbed['events'].count('restored')}")
    for job in (undisturbed, disturbed):
        print(f"{job['name']:<12} sha256 {job['sha256']}")
    print("the final weights are equal" if undisturbed["sha256"] == disturbed["sha256"] else "THE WEIGHTS DIFFER")


def picture(undisturbed: Json, disturbed: Json, path: Path) -> None:
    """Both losses by step, and the deaths so far."""
    with matplotlib.rc_context({"font.size": 8, "svg.fonttype": "none", "svg.hashsalt": "recycle_pp"}):
        figure = Figure(figsize=(7.2, 2.8), layout="constrained")
        axes = figure.add_subplot()
        count = len(disturbed["kills"])
        axes.plot(undisturbed["losses"], color="0.7", linewidth=3, label="no deaths")
        axes.plot(disturbed["losses"], color="C3", linewidth=0.8, label=f"{count} deaths")
        axes.set_xlabel("step")
        axes.set_ylabel("training loss")
        deaths = axes.twinx()
        steps = [kill["step"] for kill in disturbed["kills"]]
        deaths.step(steps, range(1, count + 1), where="post", color="0.4", linewidth=0.8, linestyle=":")
        deaths.set_ylabel("deaths so far (dotted)")
        for part in (axes, deaths):
            part.spines[["top"]].set_visible(False)
        axes.legend(frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
