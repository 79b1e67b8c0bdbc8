"""A soak test of combined options: random jobs on one machine, some of them stopped and resumed with another shape.

    python -m tests.failures.soak.options --minutes 60 --seed 7 --out soak
    python -m tests.failures.soak.options --seed 7 --job 3       # repeats the options and faults of job 7.3

Each job has a random model, optimizer, precision and number of steps, which stay the same, and random other options:
shape, sharded state, understudies, moving layers, schedule, checkpoints, validation, transport, number of launchers.
Workers are killed and suspended at random instants, at injected moments, and sometimes all at once. A third of the jobs
are stopped by SIGINT, SIGTERM or SIGKILL, and resumed with other options. Checks after each job:

- final weights, losses and samples equal those of an undisturbed worker
- metrics.jsonl and samples.jsonl have one line per step
- a replay of protocol.jsonl makes the same decisions
- no process is left

OUT/soak.jsonl has a line for each job. OUT/SEED.NUMBER.txt describes a job that failed a check. The exit code is 1 if
there are any.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from recycle_pp.testing.local_cluster import LocalJob, LocalNodes, Zygote
from tests.failures.harness import (
    TEXT,
    Case,
    Outcome,
    Runs,
    _check_no_process_lives,
    _check_replay,
    _diagnostics,
    _outcome,
    check_one_truth,
)
from tests.failures.matrix import MOMENTS
from tests.once import once

COMMON = ("model=tiny", f"data.path={TEXT}", "run.sample_log=true", "numerics=reproducible", "run.respawns=100000")
PAUSES = (0.02, 0.2, 1.0, 3.0, 8.0)  # seconds; longer than control.suspicion in some jobs
FAULTS = 25.0  # seconds after which a part of a job has no more faults, so that it ends
HUNG = 150.0  # seconds without faults after which a job counts as hung
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


@dataclass
class Part:
    """A start of a job.

    nodes        number of launchers
    mean         mean seconds between two faults
    at_once      whether several workers may be killed at the same time
    drains       whether a worker gets SIGTERM, after which it leaves for good
    stop, after  the signal that ends this start, and the seconds until then; not used in the last start of a job
    """

    shape: tuple[int, int, int]
    options: list[str]
    nodes: int
    mean: float
    at_once: bool
    drains: bool
    stop: int
    after: float


@dataclass
class Plan:
    """A job. fixed: options that determine the result; microbatches: in each step, of all pipelines."""

    fixed: list[str]
    steps: int
    microbatches: int
    parts: list[Part] = field(default_factory=list)


def drawn(chance: random.Random) -> Plan:
    """A random job."""
    layers = chance.choice([2, 3, 4, 6, 8])
    fixed = [f"model.layers={layers}", f"run.seed={chance.randrange(3)}"]
    fixed.append(f"optimizer.name={chance.choice(['adamw', 'adamw', 'muon'])}")
    fixed.append(f"numerics.precision={chance.choice(['fp32', 'fp32', 'fp32', 'bf16', 'bf16-autocast'])}")
    for option, share in (
        ("model.split=null", 0.5),
        ("model.dropout=0.1", 0.3),
        ("model.recompute=true", 0.2),
        ("optimizer.moments=bf16", 0.3),
        ("optimizer.clip=null", 0.3),
        ("numerics.sums=int32", 0.3),
    ):
        if chance.random() < share:
            fixed.append(option)
    plan = Plan(fixed, chance.choice([12, 40, 80, 150]), chance.choice([4, 6, 8, 12]))
    plan.parts.append(_part(chance, plan, layers))
    while chance.random() < 0.35 and len(plan.parts) < 3:
        plan.parts.append(_part(chance, plan, layers))
    return plan


def _part(chance: random.Random, plan: Plan, layers: int) -> Part:
    shapes = [
        (pipelines, stages, plan.microbatches // pipelines)
        for pipelines in range(1, 6)
        for stages in range(1, min(4, layers) + 1)
        if plan.microbatches % pipelines == 0 and 1 < pipelines * stages <= 9
    ]
    pipelines, stages, microbatches = shape = chance.choice(shapes)
    rebalance = chance.choice(["never", "never", "never", "always", "auto"])
    options = [
        f"parallel.pipelines={pipelines}",
        f"parallel.stages={stages}",
        f"parallel.microbatches={microbatches}",
        f"parallel.backend={chance.choice(['tcp', 'tcp', 'tcp', 'tcp', 'gloo'])}",
        f"parallel.sharded={chance.choice(['true', 'false'])}",
        f"parallel.optimizer_copies={chance.choice([0, 1, 2, 2, 3])}",
        f"optimizer.stagger={chance.choice(['true', 'false'])}",
        f"state.understudy={chance.choice(['auto', 'never'])}",
        f"state.log={chance.choice(['device', 'device', 'host'])}",
        f"schedule.rebalance={rebalance}",
        f"schedule.profile_steps={3 if rebalance == 'auto' else chance.choice([0, 3])}",
        f"schedule.reroute={chance.choice(['failed_only', 'failed_only', 'any'])}",
        f"schedule.backward={chance.choice(['mixed', 'coupled', 'decoupled'])}",
        f"schedule.memory_extra={chance.choice(['null', '0', '1', '2'])}",
        f"checkpoint.every={chance.choice([0, 3, 7, 20])}",
        f"run.validate_every={chance.choice([0, 3, 10])}",
        f"run.standby={chance.choice(['auto', 'auto', 'off'])}",
        *chance.choice([("control.suspicion=2", "control.heartbeat=0.1"), ("control.suspicion=6",)]),
    ]
    # A worker that dies by an injected fault does not return, so those of pipeline 0 have none.
    faults = [
        f"{chance.randrange(plan.steps)}:{pipeline}.{chance.randrange(stages)}@{chance.choice(list(MOMENTS))}"
        for pipeline in range(1, pipelines)
        if chance.random() < 0.3
    ]
    options += [f"+fail_at=[{','.join(faults)}]"] if faults else []
    return Part(
        shape,
        options,
        nodes=pipelines if chance.random() < 0.3 else 1,
        mean=chance.choice([0.3, 0.6, 1.5]),
        at_once=chance.random() < 0.3,
        drains=pipelines > 1 and not faults and chance.random() < 0.3,
        stop=chance.choice(STOPS),
        after=chance.uniform(0.5, 6.0),
    )


class Soak:
    """Runs the jobs. jobs: the lines of soak.jsonl."""

    def __init__(self, zygote: Zygote, out: Path) -> None:
        self._zygote, self._out = zygote, out
        self._runs = Runs(zygote, defaultdict(list), out)
        self.jobs: list[dict[str, Any]] = []

    def run(self, name: str) -> None:
        chance, begun = random.Random(name), time.monotonic()
        plan = drawn(chance)
        said: list[str] = []
        folder = Path(tempfile.mkdtemp(prefix=f"run-{name}-", dir=self._out))
        try:
            outcome = self._outcome(plan, chance, folder, said)
            self._compare(plan, outcome)
            shutil.rmtree(folder)
            deaths = outcome.deaths
        except Exception:  # the soak continues with the next job
            described = json.dumps(asdict(plan), indent=1)
            (self._out / f"{name}.txt").write_text("\n".join((described, *said, traceback.format_exc())))
            deaths = -1
        line = {"job": name, "passed": deaths >= 0, "deaths": deaths, "seconds": round(time.monotonic() - begun, 1)}
        self.jobs.append(line)
        print(json.dumps(line), flush=True)
        with (self._out / "soak.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _outcome(self, plan: Plan, chance: random.Random, folder: Path, said: list[str]) -> Outcome:
        """The outcome of the last start. said: filled with the faults."""
        common = [*COMMON, *plan.fixed, f"run.steps={plan.steps}", f"run.dir={folder}"]
        for number, part in enumerate(plan.parts):
            last = part is plan.parts[-1]
            words = [*common, *part.options, "run.resume=auto"] if number else [*common, *part.options]
            said.append(f"start {number}: {' '.join(part.options)}")
            one = part.nodes == 1
            with self._zygote.run(words) if one else self._zygote.run_nodes(words, part.nodes) as job:
                disturb(job, part, last, chance, said)
                try:
                    code = job.wait(HUNG)
                except TimeoutError:
                    raise AssertionError(f"hung\n{_diagnostics(job)}") from None
                outcome = _outcome(Case("", "2x2"), code, 0.0, job)
                _check_no_process_lives(job)
                _check_replay(job.run)
            tail = f"{outcome.output[-3500:]}\n{outcome.events[-25:]}\n{outcome.logs[-6000:]}"
            ended = (0,) if last else (0, 130, 143) if part.stop != signal.SIGKILL else (0, 1, 137, -9)
            assert code in ended, f"exit code {code}\n{tail}"
        return outcome

    def _compare(self, plan: Plan, outcome: Outcome) -> None:
        shape = ("parallel.pipelines=1", "parallel.stages=1", f"parallel.microbatches={plan.microbatches}")
        undisturbed = Case("undisturbed", "1x1", (*COMMON, *plan.fixed, *shape), steps=plan.steps, deaths=0, bound=300)
        make = partial(self._runs._without_traces, undisturbed)
        expected = once(self._out, f"undisturbed {undisturbed.arguments}", make)
        assert outcome.losses == expected.losses
        assert outcome.summary["weights_sha256"] == expected.summary["weights_sha256"] is not None
        assert outcome.samples == expected.samples
        check_one_truth(outcome)


def disturb(job: LocalJob | LocalNodes, part: Part, last: bool, chance: random.Random, said: list[str]) -> None:
    """Kills and suspends workers until the job has ended, is stopped, or has had enough faults. said: filled with the
    faults"""
    with suppress(TimeoutError):  # a job that does not start counts as hung
        job.wait_for_event("started", HUNG)
    begun, drains = time.monotonic(), part.drains
    paused: dict[int, float] = {}  # process -> time.monotonic() of its SIGCONT
    try:
        while (seconds := time.monotonic() - begun) < FAULTS and not _has_ended(job):
            for pid in [pid for pid, until in paused.items() if seconds >= until]:
                _signal(pid, signal.SIGCONT)
                del paused[pid]
            if not last and seconds >= part.after:
                said.append(f"{seconds:.2f} {signal.Signals(part.stop).name} to the job")
                _stop(job, part.stop)
                return
            workers = sorted(job.workers().items())
            number = chance.randrange(1, len(workers) + 1) if part.at_once and workers and chance.random() < 0.3 else 1
            for rank, pid in chance.sample(workers, min(number, len(workers))):
                what = chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
                if drains:
                    what, drains = signal.SIGTERM, False
                if what == signal.SIGSTOP:
                    paused[pid] = seconds + chance.choice(PAUSES)
                said.append(f"{seconds:.2f} {what.name} to rank {rank}")
                _signal(pid, what)
            time.sleep(min(chance.expovariate(1 / part.mean), 5.0))
    finally:
        for pid in paused:
            _signal(pid, signal.SIGCONT)


def _stop(job: LocalJob | LocalNodes, number: int) -> None:
    if number == signal.SIGKILL:  # as if the machine were lost
        for pid in [*job.supervisors(), *job.workers().values()]:
            _signal(pid, number)
    else:
        job.signal(number)


def _has_ended(job: LocalJob | LocalNodes) -> bool:
    try:
        job.wait(0.001)
    except TimeoutError:
        return False
    return True


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.failures.soak.options", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="time after which no further job starts")
    parser.add_argument("--seed", default="0", help="the jobs of a seed are always the same (0)")
    parser.add_argument("--job", type=int, help="run only the job with this number")
    parser.add_argument("--out", type=Path, help="folder for the results (a new temporary folder)")
    options = parser.parse_args(arguments)
    out = options.out or Path(tempfile.mkdtemp(prefix="soak-"))
    out.mkdir(parents=True, exist_ok=True)
    begun, number = time.monotonic(), options.job or 0
    with Zygote() as zygote:
        soak = Soak(zygote, out.absolute())
        soak.run(f"{options.seed}.{number}")
        while options.job is None and time.monotonic() - begun < 60 * options.minutes:
            number += 1
            soak.run(f"{options.seed}.{number}")
    failed = [job["job"] for job in soak.jobs if not job["passed"]]
    print(
        f"{len(soak.jobs)} jobs, {sum(max(job['deaths'], 0) for job in soak.jobs)} deaths, failed: {failed or 'none'}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
