"""Runs a real job of emulated workers on this machine, with a long availability trace compressed into minutes.

    replayed = replay(job, there, seconds=240, seed=1)
    replayed.steps, replayed.there, replayed.run     # committed steps, actual availability, run folder

torchrun starts the trainer with `emulate=sleep`: processes, messages and recoveries are real, and only ops sleep.
`recycle_pp.chaos` kills workers and holds them back while they are down. It prints which workers it killed and when, so
that the simulation can repeat these changes.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from recycle_schedules import Worker
from recycle_schedules.op_kinds import SPLIT

from recycle_pp.telemetry.events.job import Finished, Stopped
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.telemetry.run_reader import RunReader

from .availability import Availability, Change
from .job import Job, even

WARM = 8
"""Steps before the trace begins. The first steps measure the durations."""
STARTED = 240.0
"""Timeout in seconds for the job's start and the first WARM steps."""
STRUCK = re.compile(r"\s*[\d.]+ s\s+(kill|return)\s+worker (\d+\.\d+)")


@dataclass(frozen=True)
class Replayed:
    steps: float  # number of steps committed within the time of the trace
    there: Availability  # actual availability; machine k is worker (k // P, k % P)
    run: RunFolder


Launch = Callable[[list[str], int, Path], AbstractContextManager[None]]
"""Starts a trainer. Arguments: its settings, the number of workers, the file for its output. Leaving the context stops
the job."""


@contextmanager
def torchrun(settings: list[str], workers: int, log: Path) -> Iterator[None]:
    """A `Launch` by torchrun on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={workers}", f"--master-port={port}",
        "-m", "recycle_pp.train", *settings,
    ]  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=out, stderr=out)
    try:
        yield
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def replay(
    job: Job, there: Availability, seconds: float, seed: int, folder: Path,
    more: Sequence[str] = (), launch: Launch = torchrun,
) -> Replayed:  # fmt: skip
    """Runs a job of D x P local workers. The number of live workers follows `there`, scaled to D x P.

    Blocks for `seconds`, and for the start and end of the job.

    folder  parent of the run folder
    more    further settings of the trainer, for instance `schedule.rebalance=auto` and `model.layers`
    launch  starts and stops the trainer

    Raises:
        ValueError: the job's stages take different times, which cannot be emulated.
        RuntimeError: the job did not complete its first steps. The message contains the end of its output.
    """
    trace = folder / "trace.csv"
    trace.write_text("second,workers\n" + "".join(f"{at},{n}\n" for at, n in _counts(job, there, seconds)))
    run = RunFolder(folder / "run")
    with launch([*_settings(job, run), *more], job.workers, folder / "log"):
        _until_step(run, WARM, folder / "log")
        begun = time.time()
        changes = _run_chaos(run, trace, seed, job.stages, begun + seconds)
        times = [line.time for line in RunReader(run).steps() if line.time is not None]
    done = sum(begun < at <= begun + seconds for at in times)
    real = Availability(job.workers, seconds, tuple(change for change in changes if change.at < seconds))
    return Replayed(done, real, run)


def _counts(job: Job, there: Availability, seconds: float) -> Iterator[tuple[float, int]]:
    """The compressed trace: (seconds, workers). It begins with all workers, because the job starts with all."""
    yield 0.0, job.workers
    for begin, _, machines in there.counts():
        yield max(0.2, begin * seconds / there.seconds), round(machines * job.workers / there.machines)
    yield seconds, job.workers


def _settings(job: Job, run: RunFolder) -> list[str]:
    times = job.problem.model.durations(even(job.problem.model.count, job.stages))  # the initial layout
    alike = {kind: set(times[kind]) for kind in SPLIT}
    if any(max(found) > min(found) * (1 + 1e-9) for found in alike.values()):
        raise ValueError("--replay: the job's stages take different times, which cannot be emulated")
    limit = job.problem.memory_limit
    known = [f"emulate.{kind}={min(found)}" for kind, found in alike.items()]
    return [
        *known, "model=tiny", "emulate=sleep", "emulate.O=0", f"run.dir={run.path}", "run.steps=1000000",
        "run.validate_every=0", "run.respawns=1000000", f"parallel.pipelines={job.pipelines}",
        f"parallel.stages={job.stages}",
        f"parallel.microbatches={job.problem.counts[0]}", f"model.layers={job.stages}",
        f"optimizer.stagger={str(job.problem.optimizer == 'staggered').lower()}",
        f"schedule.memory_extra={limit['extra'] if isinstance(limit, dict) else 'null'}",
    ]  # fmt: skip


def _until_step(run: RunFolder, step: int, log: Path) -> None:
    deadline = time.monotonic() + STARTED
    while not run.metrics.exists() or len(RunReader(run).steps()) < step:
        if time.monotonic() > deadline or (run.path.exists() and _ended(run)):
            raise RuntimeError(f"the job did not start: {log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.1)


def _ended(run: RunFolder) -> bool:
    return any(isinstance(event, Stopped | Finished) for event in RunReader(run).events())


def _run_chaos(run: RunFolder, trace: Path, seed: int, stages: int, until: float) -> list[Change]:
    """Kills and releases workers according to the trace, until the time `until` (seconds since 1970) or the end of the
    job.

    Returns the actual changes. Their times are seconds since chaos was started.
    """
    command = [sys.executable, "-m", "recycle_pp.chaos", "--run-dir", str(run.path), "--trace", str(trace)]
    begun = time.time()
    changes: list[Change] = []
    with subprocess.Popen([*command, "--seed", str(seed)], stdout=subprocess.PIPE, text=True) as chaos:

        def listen() -> None:
            assert chaos.stdout is not None
            for line in chaos.stdout:
                if match := STRUCK.match(line):
                    worker = Worker.parse(match[2])
                    rank = worker.pipeline * stages + worker.stage
                    changes.append(Change(time.time() - begun, rank, match[1] == "return"))

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        try:
            while time.time() < until and not _ended(run):
                time.sleep(0.2)
        finally:
            chaos.send_signal(signal.SIGINT)  # chaos then releases the workers that it holds back
            chaos.wait(30)
        listener.join(5)
    return changes
