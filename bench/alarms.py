"""Tests whether the job detects all slow workers and reports no other workers as slow.

    python bench/alarms.py quiet [--runs 10] [--load 2]     # `make train`'s command under load: false alarms
    python bench/alarms.py slow [CASE...]                   # five ways to be slow: steps until it is noticed

`quiet`: twelve workers run on all cores, and one of them is killed and restarted. --load processes use CPU time at the
same time. Every report of a slow worker counts as an alarm, and there must be none.

`slow`: a worker becomes slow and later recovers. The figures are the steps until the job reports each change.
The worker is slow for one of these reasons:

- `+slow_at`, which lasts as long as the process. The worker is killed, and its next process has normal speed.
- The worker is stopped three quarters of the time, as by cpulimit.
- A control group limits the worker to a quarter of its usual CPU time, like a container's limit (needs root).
- A process spins on the worker's core. This case needs one core more than there are workers. On two cores the job
  reports no slow worker, because the spinning process displaces others and the peer waits nearly as long.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path

from recycle_pp.linux.processes import process_stat
from recycle_pp.telemetry.run_folder import RunFolder

SPIN = [sys.executable, "-c", "while True: pass"]
TRAIN = ["+fail_at=20:1.2", "+rejoin_at=40:1.2"]  # `make train`
FOUR = ["parallel=2x2", "model=small", "run.steps=100000", "run.validate_every=0", "checkpoint.minutes=0"]
TWO = ["parallel.pipelines=2", "parallel.stages=1", *FOUR[1:]]
SLOW, BEGIN, KILLED = "1.0", 25, 45  # the slow worker; step in which it becomes slow; step in which `+fail_at` kills it


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["quiet", "slow"])
    parser.add_argument("cases", nargs="*", help="numbers of the cases of `slow`, from 0; default: all")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--load", type=int, default=os.cpu_count() or 1, help="processes that burn CPU time")
    arguments = parser.parse_args()
    return quiet(arguments.runs, arguments.load) if arguments.what == "quiet" else slow(arguments.cases)


def quiet(runs: int, load: int) -> int:
    """Returns the number of alarms."""
    print(f"{os.cpu_count()} cores, {load} processes as load\n{'run':>4}{'seconds':>9}{'load':>7}{'alarms':>8}")
    alarms = 0
    for number in range(runs):
        begun = time.monotonic()
        with spinning(load), launched(12, TRAIN) as (process, run):
            assert process.wait() == 0
            said = (run.path / "output").read_text().count(" is slow: ")
        alarms += said
        average = os.getloadavg()[0]
        print(f"{number:>4}{time.monotonic() - begun:>9.0f}{average:>7.1f}{said:>8}", flush=True)
    print(f"{alarms} alarms in {runs} runs")
    return alarms


def slow(cases: list[str]) -> int:
    """Returns the number of mistakes: slow workers reported too late, and other workers reported as slow."""
    bad = 0
    print(f"{'reason':<28}{'found after':>12}{'end after':>11}   steps; false alarms")
    for number, (name, workers, arguments, throttle) in enumerate(CASES):
        if cases and str(number) not in cases:
            continue
        if throttle is crowded and (os.cpu_count() or 1) <= workers:
            print(f"{name:<28} not tried: {workers} workers need {workers + 1} cores")
            continue
        with launched(workers, arguments) as (_, run):
            until(run, partial(has_done, run, BEGIN))
            pid = [e["pid"] for e in run.lines(run.events) if e["event"] == "spawned" and e["worker"] == SLOW][-1]
            with throttle(pid):
                begun = BEGIN if throttle is nothing else steps(run)
                found = wait(run, "slow", begun)
                normal = steps(run)
            ended = wait(run, "slow_no_more", found)
            normal = next((e["step"] for e in run.lines(run.events) if e["event"] == "rejoined"), normal)
            others = [
                e for e in run.lines(run.events) if e["event"] == "slow" and (e["worker"] != SLOW or e["step"] < begun)
            ]
        named = "; ".join(f"{e['worker']} in step {e['step']} by {e['factor']}" for e in others) or "none"
        print(f"{name:<28}{found - begun:>12}{ended - normal:>11}   {named}", flush=True)
        bad += (found - begun > 8) + len(others)
    return bad


# ------------------------------------------------------------------------------------------------------------ a job


@contextmanager
def launched(workers: int, arguments: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], RunFolder]]:
    with tempfile.TemporaryDirectory(prefix="recycle-bench-") as folder:
        run = RunFolder(Path(folder) / "run")
        run.path.mkdir()
        torchrun = str(Path(sys.executable).with_name("torchrun"))
        command = [torchrun, f"--nproc-per-node={workers}", "-m", "recycle_pp.train"]
        with (run.path / "output").open("wb") as output:
            process = subprocess.Popen(
                [*command, *arguments, f"run.dir={run.path}"],
                stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        try:
            yield process, run
        finally:
            process.terminate()
            process.wait()


def steps(run: RunFolder) -> int:
    """Number of committed steps."""
    return max((line["step"] + 1 for line in run.lines(run.metrics)), default=0)


def has_done(run: RunFolder, count: int) -> bool:
    return steps(run) >= count


def wait(run: RunFolder, event: str, after: int) -> int:
    """Waits until the slow worker has this event in step `after` or later. Returns the step of the event."""
    found: list[int] = []

    def look() -> bool:
        found[:] = [e["step"] for e in run.lines(run.events) if (e["event"], e["worker"]) == (event, SLOW)]
        return max(found, default=-1) >= after

    until(run, look)
    return max(found)


def until(run: RunFolder, true: Callable[[], bool], seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError((run.path / "output").read_text()[-3000:])
        time.sleep(0.05)


# ------------------------------------------------------------------------------------------------------- slowdowns


@contextmanager
def spinning(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    processes = [subprocess.Popen(SPIN) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextmanager
def limited(pid: int) -> Iterator[None]:
    """The worker runs a quarter of the time, as under `cpulimit`."""
    over = threading.Event()

    def beat() -> None:
        with suppress(ProcessLookupError):
            while not over.is_set():
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.03)
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.01)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def granted(pid: int) -> Iterator[None]:
    """A control group limits the worker to a quarter of the CPU share that it used before."""
    before, begun = cpu_seconds(pid), time.monotonic()
    time.sleep(3.0)
    share = (cpu_seconds(pid) - before) / (time.monotonic() - begun) / 4
    root = Path("/sys/fs/cgroup/cpu" if Path("/sys/fs/cgroup/cpu").is_dir() else "/sys/fs/cgroup")
    group = root / f"recycle-bench-{pid}"
    group.mkdir()
    quota = round(max(0.01, share) * 100_000)  # microseconds in each 0.1 s
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{quota} 100000")
    else:
        (group / "cpu.cfs_quota_us").write_text(f"{quota}")
    try:
        (group / "cgroup.procs").write_text(f"{pid}")
        yield
    finally:
        (root / "cgroup.procs").write_text(f"{pid}")
        group.rmdir()


@contextmanager
def nothing(_pid: int) -> Iterator[None]:
    yield


@contextmanager
def crowded(pid: int) -> Iterator[None]:
    """The worker shares its core with a spinning process."""
    core = max(os.sched_getaffinity(0))
    everywhere = os.sched_getaffinity(pid)
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {core})
    with spinning(1) as (neighbour,):
        os.sched_setaffinity(neighbour.pid, {core})
        yield
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), everywhere)


def cpu_seconds(pid: int) -> float:
    stat = process_stat(pid)
    return (0 if stat is None else stat.cpu_ticks) / os.sysconf("SC_CLK_TCK")


def faults(factor: float) -> list[str]:
    return [f"+slow_at={BEGIN}:{SLOW}@{factor}", f"+fail_at={KILLED}:{SLOW}", f"+rejoin_at={KILLED + 2}:{SLOW}"]


CASES: list[tuple[str, int, list[str], Callable[[int], AbstractContextManager[object]]]] = [
    ("+slow_at by 1.5", 4, [*FOUR, *faults(1.5)], nothing),
    ("+slow_at by 3", 4, [*FOUR, *faults(3.0)], nothing),
    ("stopped 3/4 of the time", 2, TWO, limited),
    ("a quarter of its CPU time", 2, TWO, granted),
    ("a neighbour on its core", 2, TWO, crowded),
]

if __name__ == "__main__":
    sys.exit(bool(main()))
