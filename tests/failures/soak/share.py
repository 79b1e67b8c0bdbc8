"""The share of its undisturbed throughput that a job keeps under kills, pauses and partitions.

    python -m tests.failures.soak.share                            # as root, in a clone; takes 45 minutes
    python -m tests.failures.soak.share --compute real --steps 5600 --undisturbed 2100

A published test of this kind ran 32 replicas on one machine for 30 minutes with a fault every 29 seconds (SIGKILL,
SIGSTOP or a partition), and kept 97.7 % of its undisturbed throughput. This one has three nodes (network, process and
mount namespaces), each with its own torchrun and four workers (3 x 4). One job runs without faults, and one with these:

- kill worker: SIGKILL. Its supervisor starts another process.
- stop worker: SIGSTOP for 10 seconds. The job treats the worker as hung and replaces it.
- cut node: no packet leaves or reaches a node for 10 seconds. The job continues without its four workers. The node
  leaves; 3 seconds later its agent is restarted and joins.

Two shares are printed:

- The ratio of both jobs' steps per second. Only the first --undisturbed steps of the undisturbed job are measured.
- The share of the disturbed job's time that its steps would have taken without faults. The time of an undisturbed step
  is the median of the job's own steps with all workers in the second half of the time between two faults. This share is
  more accurate on a machine whose speed drifts.

The other figures:

share of what they can do  the second share, divided by the average share of live workers. Meaningless with real compute
                           on few cores, because fewer workers then get more of the cores.
lost                       time from a fault to the next one, minus the time of that many undisturbed steps
of it absent               the part of this that is due to missing workers: time of each step x share of missing workers

Both jobs must have the same losses and, with real compute, the same final weights. With real compute both jobs make
--steps steps, because the learning rate depends on the number of steps. OUT keeps the events and metrics of both jobs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from recycle_pp.telemetry.run_folder import RunFolder
from tests.failures import network
from tests.failures.harness import Case

from .faults import PLACES, Fault
from .job import SoakedJob

SHARES = {"kill worker": 27, "stop worker": 17, "cut node": 18}  # the 62 faults of the published test
LENGTH = 10.0  # duration of a pause or a partition, seconds
SETTLE = 30  # the first steps do not count, because workers still measure op durations and standbys import torch
COMMON = ("parallel.microbatches=6", "run.respawns=100000", "control.suspicion=2")
NEVER = Fault("kill worker", float("inf"), 0.0, 0, 1, 0)
COMPUTE = {
    "sleep": ("emulate=sleep", "emulate.F=0.02", "emulate.I=0.02", "emulate.W=0.02", "emulate.O=0.06"),
    "real": ("model=small", "data.path=null"),  # the data are the source files of Python's standard library
}


def main(arguments: list[str]) -> int:
    options = _options(arguments)
    if why := network.missing():
        print(f"share: {why}", file=sys.stderr)
        return 2
    out = Path(options.out).absolute()
    steps = options.steps if options.compute == "real" else options.undisturbed
    undisturbed = measure("undisturbed", steps, iter([NEVER]), options, out)
    disturbed = measure("disturbed", options.steps, published(options.seed, options.every), options, out)
    differences = undisturbed["differences"] + disturbed["differences"] + compare(undisturbed, disturbed)
    undisturbed["metrics"] = undisturbed["metrics"][: options.undisturbed - SETTLE]
    result = summary(undisturbed, disturbed) | {"differences": differences, "options": vars(options)}
    (out / "share.json").write_text(json.dumps(result, indent=1))
    show(result)
    return 1 if differences else 0


def published(seed: int, every: float) -> Iterator[Fault]:
    """An endless sequence of faults, one every `every` seconds, with the kinds and shares of the published test."""
    chance = random.Random(seed)
    while True:
        kind = chance.choices(list(SHARES), list(SHARES.values()))[0]
        place, other = chance.sample(range(PLACES), 2)
        yield Fault(kind, every, 0.0 if kind == "kill worker" else LENGTH, place, other, chance.randrange(4))


def measure(name: str, steps: int, faults: Iterator[Fault], options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Runs a job of `steps` steps. Returns its metrics from step SETTLE on, its events, and the promises it broke."""
    folder = out / name
    folder.mkdir(parents=True)
    case = Case(name, "3x4", (*COMMON, *COMPUTE[options.compute]), steps=steps)
    begun = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begun:7.1f} s  {name}: {text}", flush=True)

    with SoakedJob(case, folder, None, say) as job:
        job.start()
        job.survive(faults)
        job.end()
        injected = [(fault.fault.kind, fault.step) for fault in job.injected if not fault.left_out]
    run = RunFolder(folder / "run")
    return {
        "metrics": [line for line in run.lines(run.metrics) if line["step"] >= SETTLE],
        "events": run.lines(run.events),
        "sha256": json.loads(run.summary.read_text())["weights_sha256"] if run.summary.exists() else None,
        "faults": injected,
        "joins": job.joins,
        "differences": job.differences,
    }


def compare(undisturbed: dict[str, Any], disturbed: dict[str, Any]) -> list[str]:
    """Differences between the losses and weights of the two jobs, as sentences."""
    pairs = zip(undisturbed["metrics"], disturbed["metrics"], strict=False)
    different = [a["step"] for a, b in pairs if (a["step"], a["loss"]) != (b["step"], b["loss"])]
    found = [f"{len(different)} steps have different losses, the first is step {different[0]}"] if different else []
    equally_long = len(undisturbed["metrics"]) == len(disturbed["metrics"])
    if equally_long and undisturbed["sha256"] != disturbed["sha256"]:
        found.append("the final weights differ")
    return found


def summary(undisturbed: dict[str, Any], disturbed: dict[str, Any]) -> dict[str, Any]:
    whole, broken = _rate(undisturbed["metrics"]), _rate(disturbed["metrics"])
    lines, steps = disturbed["metrics"], _steps(disturbed["metrics"])
    total = sum(seconds for _, seconds, _ in steps)
    living = sum(seconds * live for _, seconds, live in steps) / total / 12
    usual = median(seconds for _, seconds, live in steps if live == 12)
    costs: dict[str, list[dict[str, float]]] = {kind: [] for kind in SHARES}
    faults = [(kind, max(step, lines[0]["step"])) for kind, step in disturbed["faults"]]
    ends = [step for _, step in faults[1:]] + [lines[-1]["step"] + 1]
    lost = 0.0
    for (kind, step), end in zip(faults, ends, strict=True):
        own = [(seconds, live) for number, seconds, live in steps if step <= number < end]
        calm = [seconds for seconds, live in own[len(own) // 2 :] if live == 12]
        usual = median(calm) if calm else usual
        if own:
            absent = sum(seconds * (1 - live / 12) for seconds, live in own)
            costs[kind].append({
                "longest": max(seconds for seconds, _ in own),
                "lost": sum(seconds - usual for seconds, _ in own),
                "absent": absent,
            })  # fmt: skip
            lost += costs[kind][-1]["lost"]
    return {
        "costs": costs,
        "deaths": sum(event["event"] == "death_detected" for event in disturbed["events"]),
        "joins": disturbed["joins"], "seconds": total, "undisturbed": whole, "disturbed": broken,
        "share": broken / whole, "own_share": 1 - lost / total,
        "living": living, "of_the_living": (1 - lost / total) / living,
    }  # fmt: skip


def _steps(metrics: list[dict[str, Any]]) -> list[tuple[int, float, int]]:
    """(step, seconds since the previous commit, live workers) of each step except the first."""
    return [(b["step"], b["time"] - a["time"], b["live_workers"]) for a, b in pairwise(metrics)]


def _rate(metrics: list[dict[str, Any]]) -> float:
    """Steps per second."""
    return (len(metrics) - 1) / (metrics[-1]["time"] - metrics[0]["time"])


def show(result: dict[str, Any]) -> None:
    print(f"{sum(map(len, result['costs'].values()))} faults in {result['seconds']:.0f} s")
    print(f"{'':>14}{'faults':>8}{'longest gap':>13}{'lost':>9}{'of it absent':>14}   seconds: median, mean, mean")
    for kind, costs in result["costs"].items():
        if costs:
            gap = median(cost["longest"] for cost in costs)
            lost, absent = (mean(cost[key] for cost in costs) for key in ("lost", "absent"))
            print(f"{kind:>14}{len(costs):>8}{gap:>13.2f}{lost:>9.2f}{absent:>14.2f}")
    print(f"{result['deaths']} deaths, {result['joins']} starts of an agent with +join")
    print(f"undisturbed {result['undisturbed']:.3f}, disturbed {result['disturbed']:.3f} steps/s")
    print(f"share of undisturbed work: {result['share']:.3f}; by its own undisturbed steps: {result['own_share']:.3f}")
    print(f"live workers: {result['living']:.3f} of all; share of what they can do: {result['of_the_living']:.3f}")
    print("bits: " + ("; ".join(result["differences"]) or "equal"))


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.failures.soak.share",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--compute", choices=list(COMPUTE), default="sleep", help="emulated or real ops")
    parser.add_argument(
        "--steps",
        type=int,
        default=3600,
        help="steps of the disturbed job, or with real compute of each job (default 3600, about 30 minutes)",
    )
    parser.add_argument(
        "--undisturbed",
        type=int,
        default=1200,
        help="number of first steps over which the rate of the undisturbed job is measured (default 1200)",
    )
    parser.add_argument("--every", type=float, default=29.0, help="seconds between two faults (default 29)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the faults")
    parser.add_argument("--out", default="share", help="a new folder (default: share)")
    options = parser.parse_args(arguments)
    if min(options.steps, options.undisturbed) <= SETTLE + 1:
        parser.error(
            f"--steps and --undisturbed must be more than {SETTLE + 1}, as the first {SETTLE} steps are not measured"
        )
    if Path(options.out).exists():
        parser.error(f"--out: {options.out} exists")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
