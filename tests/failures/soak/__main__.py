"""A soak test: jobs on three nodes under random faults, each compared bit for bit with an undisturbed run.

    python -m tests.failures.soak --minutes 60 --seed 7 --out soak      # as root, in a clone of the repository
    python -m tests.failures.soak --seed 7 --job 3                      # repeats the faults of job 7.3

Each node consists of a network, a process and a mount namespace, and has its own torchrun. Faults are kills, pauses,
cuts in one or both directions, resets, packet loss with delay and reordering, and a run folder that does not answer. A
majority of the nodes and a worker of each stage always survive. Lost nodes return with +join. Checks after each job:

- final weights, losses and samples equal those of an undisturbed worker
- metrics.jsonl and samples.jsonl have one line per step
- torchrun has ended with exit code 0 on every node that was intact at the end
- no process, shared memory or temporary file is left

OUT/soak.jsonl has a line for each fault and each job. OUT keeps the folders of jobs that failed a check. The exit code
is 1 if there are any.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from recycle_pp.telemetry.replay import Replay
from recycle_pp.testing.local_cluster import Zygote
from tests.failures import network
from tests.failures.disk import Disk
from tests.failures.harness import Case, Outcome, Runs, _outcome, explain

from .faults import KINDS, draw
from .job import Injected, SoakedJob

MOST_FAILED = 3  # consecutive jobs that the soak failed to run, after which it stops
COUNTS = ("steps", "seconds", "faults", "deaths", "elections", "rejoined", "joins", "given_up")  # summed over the jobs
COMMON = ("control.suspicion=5", "run.respawns=100000", "checkpoint.every=40")


def main(arguments: list[str]) -> int:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    options = _options(arguments)
    if why := network.missing():
        print(f"soak: {why}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: _interrupt())
    out = Path(options.out or tempfile.mkdtemp(prefix="soak-"))
    out.mkdir(parents=True, exist_ok=True)
    with Zygote() as zygote:
        soak = Soak(options, out.absolute(), Runs(zygote, defaultdict(list), out))
        with contextlib.suppress(KeyboardInterrupt):
            soak.run()
    print(table(soak.faults, soak.jobs))
    print(f"soak: {out}/soak.jsonl")
    return 1 if any(job["differences"] for job in soak.jobs) or not soak.jobs else 0


class Soak:
    """Runs the jobs. faults, jobs: the lines of soak.jsonl about them."""

    def __init__(self, options: argparse.Namespace, out: Path, runs: Runs) -> None:
        self.faults: list[dict[str, Any]] = []
        self.jobs: list[dict[str, Any]] = []
        self._options, self._out, self._runs = options, out, runs
        self._begun = time.monotonic()
        self._disks = Disk.missing()
        if self._disks:
            print(f"soak: no disk will be frozen: {self._disks}")

    def run(self) -> None:
        """Starts jobs until the time is over, and finishes the last one."""
        number, failed = self._options.job or 0, 0
        while failed < MOST_FAILED:
            try:
                self._job(number)
                failed = 0
            except Exception:  # the soak continues with the next job
                failed += 1
                self._failed(number, traceback.format_exc())
            if self._options.job is not None or time.monotonic() - self._begun > 60 * self._options.minutes:
                return
            number += 1

    def _job(self, number: int) -> None:
        name = f"{self._options.seed}.{number}"
        case = self._case(name)
        folder = Path(tempfile.mkdtemp(prefix=f"job-{name}-", dir=self._out))
        begun = time.time()
        self._say(f"job {name}: {case.steps} steps, {' '.join(case.overrides)}{' staggered' * case.stagger}")
        expected = self._runs.fault_free(case)
        with contextlib.ExitStack() as stack:
            stack.callback(self._keep_or_remove, folder)
            disk = None if self._disks else stack.enter_context(Disk(folder))
            job = stack.enter_context(SoakedJob(case, folder, disk, self._say, lambda s: self._fault(name, s)))
            job.start()
            chance = random.Random(f"faults {name}")
            job.survive(draw(chance, self._options.kinds, self._options.mean, self._options.longest, job.stages))
            job.end()
            outcome = _outcome(case, 0, time.time() - begun, job.job)
            job.differences += self.compare(outcome, expected)
            if not all(decision.same for decision in Replay(job.job.run.protocol)):
                job.differences.append("recycle_pp.replay makes a different decision than the coordinator did")
            self._finish(name, job, outcome, folder)

    def _failed(self, number: int, why: str) -> None:
        """Records that the soak could not run a job."""
        print(why, flush=True)
        line = dict.fromkeys(COUNTS, 0) | {"job": f"{self._options.seed}.{number}", "differences": [why[-1500:]]}
        self.jobs.append(line)
        self._write(line)

    def _case(self, name: str) -> Case:
        chance = random.Random(f"case {name}")
        steps = self._options.steps or chance.choice((300, 450, 600))
        sharded = ("parallel.sharded=true",) if chance.random() < 0.25 else ()
        return Case(
            f"soak {name}",
            "3x2",
            COMMON + sharded,
            steps=steps,
            stagger=chance.random() < 0.25,
            deaths=None,
            bound=1200.0,
        )

    @staticmethod
    def compare(outcome: Outcome, expected: Outcome) -> list[str]:
        """Differences from the undisturbed run, as sentences."""
        steps = [line["step"] for line in outcome.metrics]
        checks = {
            f"metrics.jsonl has the steps {steps}": steps == [*range(outcome.case.steps)],
            "losses differ": outcome.losses == expected.losses,
            "samples differ": outcome.samples == expected.samples,
            "final weights differ": outcome.summary.get("weights_sha256") == expected.summary["weights_sha256"],
        }
        return [sentence[:300] for sentence, holds in checks.items() if not holds]

    def _finish(self, name: str, job: SoakedJob, outcome: Outcome, folder: Path) -> None:
        for injected, line in zip(job.injected, self.faults[-len(job.injected) or len(self.faults) :], strict=True):
            after = next((s.at for s in job.injected if s.at > injected.at), float("inf"))
            line["gap"] = _longest_gap(outcome.metrics, injected.at, after)
            line["deaths"] = sum(injected.at <= e["time"] < after for e in outcome.all("death_detected"))
        line = {
            "job": name,
            "steps": outcome.case.steps,
            "seconds": round(outcome.seconds, 1),
            "faults": sum(not injected.left_out for injected in job.injected),
            "deaths": outcome.deaths,
            "elections": len(outcome.all("coordinator_elected")),
            "rejoined": len(outcome.all("rejoined")),
            "joins": job.joins,
            "given_up": job.given_up,
            "longest_gap": _longest_gap(outcome.metrics, 0, float("inf")),
            "differences": job.differences,
        }
        self.jobs.append(line)
        self._write(line)
        self._say(f"job {name}: {'DIFFERS' if job.differences else 'equal'}: {json.dumps(line)}")
        if job.differences:
            again = f"python -m tests.failures.soak --seed {self._options.seed} --job {name.partition('.')[2]}"
            (folder / "explained.txt").write_text(explain(outcome))
            shutil.copytree(job.job.run.path, folder / "kept", ignore=shutil.ignore_patterns("checkpoints"))
            self._say(f"job {name}: its folder is {folder}; repeat it with: {again}")

    def _keep_or_remove(self, folder: Path) -> None:
        if not (folder / "kept").exists() and not self._options.keep:
            shutil.rmtree(folder, ignore_errors=True)

    def _fault(self, name: str, injected: Injected) -> None:
        line = {"fault": len(self.faults), "job": name, "step": injected.step, "time": injected.at}
        line |= asdict(injected.fault) | {"left_out": injected.left_out}
        self.faults.append(line)
        self._write(line)

    def _write(self, line: dict[str, Any]) -> None:
        with (self._out / "soak.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._begun:7.1f} s  {text}", flush=True)


def _longest_gap(metrics: list[dict[str, Any]], begin: float, end: float) -> float:
    """Longest time between two commits, seconds, of the gaps that overlap the interval from `begin` to `end`."""
    times = [line["time"] for line in metrics]
    return round(max((b - a for a, b in pairwise(times) if b > begin and a < end), default=0.0), 2)


def table(faults: list[dict[str, Any]], jobs: list[dict[str, Any]]) -> str:
    """A table of the faults: how often each kind occurred, and what it cost. Then totals over the jobs."""
    rows = [("fault", "times", "left out", "deaths", "longest gap")]
    for kind in KINDS:
        some = [f for f in faults if f["kind"] == kind and not f["left_out"]]
        left_out = sum(f["kind"] == kind and f["left_out"] for f in faults)
        gap = max((f.get("gap", 0.0) for f in some), default=0.0)
        rows.append((kind, str(len(some)), str(left_out), str(sum(f.get("deaths", 0) for f in some)), f"{gap:.1f} s"))
    lines = [f"{kind:<18}{times:>6}{left:>10}{deaths:>8}{gap:>13}" for kind, times, left, deaths, gap in rows]
    for key in COUNTS:
        lines.append(f"{key:<18}{sum(job[key] for job in jobs):>6.0f}")
    different = [job["job"] for job in jobs if job["differences"]]
    lines.append(f"{'jobs':<18}{len(jobs):>6}   of which differ: {', '.join(different) or 'none'}")
    return "\n".join(lines)


def _interrupt() -> Iterator[None]:
    raise KeyboardInterrupt


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.failures.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="minutes after which no job starts (default 60)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the jobs and faults")
    parser.add_argument("--job", type=int, help="run only this job of the seed")
    parser.add_argument("--steps", type=int, help="steps of each job (default: 300, 450 or 600, by seed)")
    parser.add_argument("--mean", type=float, default=4.0, help="average pause between faults, seconds (default 4)")
    parser.add_argument("--longest", type=float, default=60.0, help="maximum duration of a fault, seconds (default 60)")
    parser.add_argument("--kinds", help=f"comma-separated kinds of faults: {', '.join(KINDS)} (default: all)")
    parser.add_argument("--out", help="a folder (default: a temporary one)")
    parser.add_argument("--keep", action="store_true", help="keep the folders of all jobs")
    options = parser.parse_args(arguments)
    options.kinds = options.kinds.split(",") if options.kinds else list(KINDS)
    if wrong := set(options.kinds) - set(KINDS):
        parser.error(f"--kinds: unknown: {', '.join(wrong)}; known: {', '.join(KINDS)}")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
