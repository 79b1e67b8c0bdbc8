"""Stall of a job when a worker is killed, phase by phase, and the cost of the broken step.

    python bench/recovery.py [--deaths 20] [--launcher torchrun|fork] [--compute sleep|real] [--seed 1]
    python bench/recovery.py --mtbf 5 [--seconds 120]
    python bench/recovery.py --again [--deaths 20]

Twelve workers (3 pipelines, 4 stages, 6 micro-batches) train. The bench repeatedly sends SIGKILL to a random worker at
a random instant of a step. The supervisor restarts the worker, and it rejoins. `sleep` emulates compute (20 ms per op),
so twelve processes on few cores can react like the hosts of twelve GPUs. `real` trains a small model.

The table shows milliseconds from the kill. `stall` ends when the last survivor that had to wait has started its next
op. `excess` is the time of the broken step beyond the median step without a death, in steps. It cannot be 0, because a
worker is missing for a part of that step.

With --mtbf, workers are killed at random, one in that many seconds on average, even if an earlier one is not back yet.
The table shows the phases until a killed worker takes part again. `live work` is the number of committed steps, divided
by the number that all workers would commit in the same time and by the share of live workers. 1 means that a death
costs only the dead worker's own work.

With --again, one worker is killed, and again 0.3 s after each return, usually before it has a new standby process. The
bench prints the seconds from a kill until the worker takes part again.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from results import save

from recycle_pp.chaos import Live
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.testing.local_cluster import Zygote

Kills = list[tuple[float, str]]  # time, worker
WORKERS = 12
STEADY = 30  # steps before the first death
WARM_SECONDS = 20.0
BACK = ("death_detected", "respawned", "spawned", "joining", "rejoined")
PHASES = ("detected", "announced", "unblocked", "regrouped", "planned", "resumed")
COMMON = ["parallel=3x4", "model=tiny", "run.steps=100000", "run.validate_every=0", "run.respawns=1000"]
COMPUTE = {
    "sleep": ["emulate=sleep", "emulate.F=0.02", "emulate.I=0.02", "emulate.W=0.02", "emulate.O=0.06"],
    "real": ["model=small"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deaths", type=int, default=20)
    parser.add_argument("--launcher", choices=["torchrun", "fork"], default="torchrun")
    parser.add_argument("--compute", choices=list(COMPUTE), default="sleep")
    parser.add_argument("--mtbf", type=float, help="seconds between two deaths, on average")
    parser.add_argument("--seconds", type=float, default=120.0, help="with --mtbf: duration (default 120)")
    parser.add_argument("--again", action="store_true", help="kill the same worker as soon as it is back")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("overrides", nargs="*", help="further settings, for instance optimizer.stagger=true")
    arguments = parser.parse_args()
    overrides = [*COMMON, *COMPUTE[arguments.compute], *arguments.overrides]
    with tempfile.TemporaryDirectory(prefix="recycle-bench-") as folder:
        run = RunFolder(Path(folder) / "run")
        with LAUNCHERS[arguments.launcher]([*overrides, f"run.dir={run.path}"]):
            if arguments.mtbf is not None:
                live_work(run, *kill_at_random(run, arguments, random.Random(arguments.seed)), arguments)
                return
            if arguments.again:
                returns(kill_again(run, arguments.deaths))
                return
            kills = kill_one_by_one(run, arguments.deaths, random.Random(arguments.seed))
        table(run, kills, arguments)


def kill_one_by_one(run: RunFolder, deaths: int, rng: random.Random) -> list[float]:
    """Repeatedly kills a worker at a random instant of a step, and waits until it is back and two more steps are done.

    Returns the times of the kills (time.monotonic())."""
    kills = []
    for number in range(deaths):
        back = _count(run, "rejoined")
        _until(lambda: _steps(run) > 5, 600)
        length = run.lines(run.metrics)[-1]["step_seconds"]
        _until(partial(lambda seen: _steps(run) > seen, _steps(run)), 60)  # a step has just started
        time.sleep(rng.random() * length)
        pids = {e["worker"]: e["pid"] for e in run.lines(run.events) if e["event"] == "spawned"}
        kills.append(time.monotonic())
        os.kill(pids[rng.choice(sorted(pids))], signal.SIGKILL)
        _until(partial(lambda before: _count(run, "rejoined") > before, back), 120)
        _until(partial(lambda seen: _steps(run) >= seen + 3, _steps(run)), 120)
        print(f"\r{number + 1} of {deaths} deaths", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return kills


def kill_again(run: RunFolder, deaths: int) -> list[float]:
    """Kills worker 1.2 again after each of its returns. Returns the seconds from each kill to the return."""
    _until(lambda: _steps(run) > STEADY, 600)
    time.sleep(WARM_SECONDS)
    found = []
    for number in range(deaths):
        pid = [e["pid"] for e in run.lines(run.events) if e["event"] == "spawned" and e["worker"] == "1.2"][-1]
        at = time.time()
        os.kill(pid, signal.SIGKILL)
        _until(partial(lambda before: _count(run, "rejoined") > before, number), 120)
        found.append([e["time"] for e in run.lines(run.events) if e["event"] == "rejoined"][-1] - at)
        time.sleep(0.3)
    return found


def returns(seconds: list[float]) -> None:
    """Prints the first return separately from the others, because only it finds an idle standby process."""
    later = seconds[1:]
    print(f"first return {seconds[0]:.2f} s; later median {statistics.median(later):.2f} s, max {max(later):.2f} s")


def kill_at_random(run: RunFolder, arguments: argparse.Namespace, rng: random.Random) -> tuple[Kills, float, float]:
    """Kills members at random instants, but never the last one of a stage.

    Returns the kills, and the start and the end of this phase. All times are time.time()."""
    live, kills = Live(run), []
    _until(lambda: _steps(run) > STEADY, 600)
    time.sleep(WARM_SECONDS)  # until all standby processes have finished their imports
    begun = time.time()
    due, end = begun + rng.expovariate(1 / arguments.mtbf), begun + arguments.seconds
    while due < end:
        time.sleep(max(0.0, due - time.time()))
        live.update()
        victims = [worker for worker in live.victims(cruel=False) if worker in live.members]
        if victims:
            victim = rng.choice(victims)
            kills.append((time.time(), victim))
            os.kill(live.pids[victim], signal.SIGKILL)
            live.remove(victim)
        due += rng.expovariate(1 / arguments.mtbf)
        print(f"\r{len(kills)} deaths", end="", file=sys.stderr, flush=True)
    time.sleep(max(0.0, end - time.time()))
    print(file=sys.stderr)
    return kills, begun, time.time()


def live_work(run: RunFolder, kills: Kills, begun: float, end: float, arguments: argparse.Namespace) -> None:
    events, metrics = run.lines(run.events), run.lines(run.metrics)
    plain = statistics.median(x["step_seconds"] for x in metrics[3:] if x["time"] < begun)
    done = sum(begun < x["time"] <= end for x in metrics) * plain / (end - begun)
    parts: dict[str, list[float]] = {name: [] for name in BACK}
    missing = 0.0
    for at, worker in kills:
        for name in BACK:
            found = [e["time"] for e in events if e["event"] == name and e["worker"] == worker and e["time"] > at]
            parts[name] += [found[0] - at] if found else []
        back = [e["time"] for e in events if e["event"] == "rejoined" and e["worker"] == worker and e["time"] > at]
        missing += min([*back, end]) - at
    live = 1 - missing / WORKERS / (end - begun)
    print(f"{len(kills)} deaths in {end - begun:.0f} s, {arguments.launcher}, compute={arguments.compute}")
    print(f"{'':>14}{'median':>9}{'p90':>9}{'max':>9}   s from the kill")
    for name in BACK:
        values = sorted(parts[name])
        if values:
            p90 = values[min(len(values) - 1, int(0.9 * len(values)))]
            print(f"{name:>14}{statistics.median(values):9.2f}{p90:9.2f}{values[-1]:9.2f}")
    print(f"step without a death: {1e3 * plain:.0f} ms; {live:.1%} of the workers alive; {done:.1%} of the steps done")
    print(f"live work: {done / live:.3f}")
    result = {"back": parts, "step_seconds": plain, "live": live, "done": done, "arguments": vars(arguments)}
    save(f"recovery-mtbf-{arguments.launcher}-{arguments.compute}.json", result)


def table(run: RunFolder, kills: list[float], arguments: argparse.Namespace) -> None:
    events = run.lines(run.events)
    recoveries = [e for e in events if e["event"] == "resumed"]  # one may have a cause other than a kill
    resumed = [next(e for e in recoveries if e["died_at"] >= kill) for kill in kills]
    # seconds from the kill until the supervisor detected the death
    late = [e["died_at"] - kill for e, kill in zip(resumed, kills, strict=True)]
    hit = {e["step"] for e in resumed}
    joined = {e["step"] for e in events if e["event"] == "rejoined"}
    lines = run.lines(run.metrics)[3:]
    plain = [
        x["step_seconds"] for x in lines if x["live_workers"] == 12 and not {x["step"], x["step"] - 1} & (hit | joined)
    ]
    step = statistics.median(plain)
    excess = [(x["step_seconds"] - step) / step for x in lines if x["step"] in hit]
    print(
        f"{len(resumed)} recoveries, {arguments.launcher}, compute={arguments.compute}, {' '.join(arguments.overrides)}"
    )
    print(f"{'':>12}{'median':>9}{'p90':>9}{'p99':>9}{'max':>9}   ms from the death")
    for phase in PHASES:
        _row(phase, [1e3 * (e["phases"][phase] + more) for e, more in zip(resumed, late, strict=True)])
    _row("stall", [1e3 * (e["stall_seconds"] + more) for e, more in zip(resumed, late, strict=True)])
    print(f"lost ops: {sum(e['lost_ops'] for e in resumed)}, redone: {sum(e['redone_ops'] for e in resumed)}")
    print(f"step without a death: {1e3 * step:.0f} ms (median of {len(plain)})")
    print(
        f"excess of the broken step: mean {statistics.mean(excess):.3f}, median {statistics.median(excess):.3f} steps"
    )
    above = [e["left_seconds"] / e["left_bound_seconds"] - 1 for e in resumed if e["left_bound_seconds"]]
    print(f"the rest of the step, as planned: {statistics.mean(above):.1%} above the lower bound (mean)")
    result = {"resumed": resumed, "step_seconds": step, "excess_steps": excess, "arguments": vars(arguments)}
    save(f"recovery-{arguments.launcher}-{arguments.compute}.json", result)


def _row(name: str, values: list[float]) -> None:
    values = sorted(values)
    at = lambda share: values[min(len(values) - 1, int(share * len(values)))]  # noqa: E731
    print(f"{name:>12}{statistics.median(values):9.1f}{at(0.9):9.1f}{at(0.99):9.1f}{values[-1]:9.1f}")


def _count(run: RunFolder, event: str) -> int:
    return sum(e["event"] == event for e in run.lines(run.events))


def _steps(run: RunFolder) -> int:
    return len(run.lines(run.metrics))


def _until(true: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise SystemExit(f"nothing happened for {seconds} s")
        time.sleep(0.005)


@contextmanager
def torchrun(overrides: list[str]) -> Iterator[None]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=12",
        "-m",
        "recycle_pp.train",
        *overrides,
    ]
    log = tempfile.TemporaryFile()  # noqa: SIM115
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=log, stderr=log)
    try:
        yield
    except BaseException:
        log.seek(0)
        sys.stderr.write(log.read().decode()[-3000:])
        raise
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


@contextmanager
def fork(overrides: list[str]) -> Iterator[None]:
    with Zygote() as zygote, zygote.run(overrides):
        yield


LAUNCHERS = {"torchrun": torchrun, "fork": fork}

if __name__ == "__main__":
    main()
