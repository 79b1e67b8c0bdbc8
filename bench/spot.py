"""Replays a trace of spot machines with a real job that only re-routes, and with one that also moves layers.

    python bench/spot.py examples/spot-trace-24gpu.csv [--speed 10] [--hours 1 2] [--seed 1] [SETTING ...]

The job has 6 pipelines, 4 stages, 32 micro-batches and 24 layers; F, I and W of an even stage sleep for 40 ms. Its
24 workers are separate processes, forked from one that has imported everything. `recycle_pp.chaos` kills and releases
them as in the trace, `--speed` times as fast. Between a death and the return the new process is stopped. `--hours`
replays only a part of the trace.

The first job has no deaths and runs 1F1B. Then there is a job for each value of `schedule.rebalance`. The columns:

- *committed*: steps that the job committed, and the work of these steps as a share of what the first job would have
  done in the same time.
- *simulated*: the same share by `recycle_pp.simulate`, with the same deaths at the same times, the durations that the
  job measured, measured stalls and moves, and the planned time of 1F1B. The trainer's plans and this simulation ignore
  the time that a busy machine adds to both jobs.
- *as planned*: the same with the durations of the settings, and with deaths drawn from the trace.

`schedule.outage` and `simulate --outage` are 15 minutes divided by `--speed`, like the outages of the trace.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from results import save

from recycle_pp.fitting.problem_source import compile_planner
from recycle_pp.simulation.availability import HOUR, Availability, read
from recycle_pp.simulation.compare import compare
from recycle_pp.simulation.costs import Costs
from recycle_pp.simulation.job import Job
from recycle_pp.simulation.measured import job_of
from recycle_pp.simulation.replay import Replayed, replay
from recycle_pp.telemetry.events.layers import Rebalanced
from recycle_pp.telemetry.run_reader import RunReader
from recycle_pp.testing.local_cluster import Zygote

Json = dict[str, Any]
MEMORY = {"base": "1f1b", "extra": 2}
REPLAYED = {"never": "respawned", "auto": "respawned-rebalanced"}
PLANNED = {"never": "rerouted", "auto": "rebalanced"}
PLANS = 24  # maximum number of memberships that a simulation plans
OUTAGE = 900.0  # the default of schedule.outage, in seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="a CSV file as for `python -m recycle_pp.simulate --trace`")
    parser.add_argument("--speed", type=float, default=10.0, help="times as fast as the trace")
    parser.add_argument("--hours", type=float, nargs=2, default=(0.0, math.inf), help="part to replay: from, to")
    parser.add_argument("--slot", type=float, default=0.04, help="seconds of F, I and W")
    parser.add_argument("--shape", default="6x4", help="pipelines x stages")
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--steps", type=int, default=10, help="measured steps of 1F1B")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("overrides", nargs="*", default=[])
    given = parser.parse_args()
    pipelines, stages = map(int, given.shape.split("x"))
    job = Job.of(
        pipelines=pipelines, stages=stages, microbatches=given.microbatches, layers=given.layers, memory=MEMORY,
        durations=dict.fromkeys("FIW", given.slot) | {"O": 0.0},
    )  # fmt: skip
    there = compressed(part(read(given.trace, seed=given.seed), *given.hours), given.speed)
    compile_planner()
    usual = fault_free(job, given)
    print(
        f"{given.shape} workers, M = {given.microbatches}, {given.layers} layers; {there.seconds / 60:.1f} minutes, "
        f"{given.speed:g} times as fast as the trace; a step of 1F1B takes {usual:.3f} s"
    )
    measured = [measure(mode, job, there, given) for mode in REPLAYED]
    print(f"{'rebalance':<11}{'kills':>6}{'moves':>7}{'committed':>18}{'simulated':>11}{'as planned':>12}{'load':>7}")
    rows = [row(one, job, there, usual, given) for one in measured]
    arguments = {key: str(value) for key, value in vars(given).items()}
    save("spot.json", {"usual": usual, "rows": rows, "arguments": arguments})


def part(there: Availability, begin: float, end: float) -> Availability:
    """The trace from `begin` to `end`, in hours."""
    begin, end = HOUR * begin, min(HOUR * end, there.seconds)
    absent = set(there.absent)
    for change in there.changes:
        if change.at <= begin:
            (absent.discard if change.up else absent.add)(change.machine)
    changes = tuple(change._replace(at=change.at - begin) for change in there.changes if begin < change.at < end)
    return Availability(there.machines, end - begin, changes, frozenset(absent))


def compressed(there: Availability, speed: float) -> Availability:
    changes = tuple(change._replace(at=change.at / speed) for change in there.changes)
    return replace(there, seconds=there.seconds / speed, changes=changes)


def fault_free(job: Job, given: argparse.Namespace) -> float:
    """Measured seconds of a step of 1F1B without deaths: the median."""
    quiet = Availability(job.workers, given.steps * job.total / job.pipelines * 3 * given.slot * 1.2, ())
    with tempfile.TemporaryDirectory(prefix="recycle-spot-") as folder:
        run = replayed(job, quiet, Path(folder), ["schedule=coupled", "schedule.memory_extra=0"], given).run
        return median(line.step_seconds for line in RunReader(run).steps()[2:] if line.step_seconds is not None)


@dataclass
class Measured:
    """A replay. job: has the measured durations. load: load average of the last 5 minutes."""

    mode: str
    steps: float
    moves: int
    there: Availability
    job: Job
    load: float


def measure(mode: str, job: Job, there: Availability, given: argparse.Namespace) -> Measured:
    more = [f"schedule.rebalance={mode}", f"schedule.outage={OUTAGE / given.speed}"]
    with tempfile.TemporaryDirectory(prefix="recycle-spot-") as folder:
        real = replayed(job, there, Path(folder), more, given)
        moves = sum(isinstance(event, Rebalanced) for event in RunReader(real.run).events())
        found = Measured(mode, real.steps, moves, real.there, job_of(real.run.path, memory=MEMORY), os.getloadavg()[1])
    print(f"{mode}: {found.steps:.0f} steps, {real.there.losses} kills, load {found.load:.1f}", file=sys.stderr)
    return found


def row(of: Measured, job: Job, there: Availability, usual: float, given: argparse.Namespace) -> Json:
    """Prints and returns a row of the table. usual: seconds of a step of 1F1B."""
    costs = Costs(outage=OUTAGE / given.speed)
    costs = replace(costs, start=median(costs.recovery.returns))  # only processes die, machines stay up
    same, drawn = REPLAYED[of.mode], PLANNED[of.mode]
    simulated = compare(of.job, of.there, costs, [same], seed=given.seed, plans=PLANS).outcomes[same].relative
    small = replace(job, layer_bytes=of.job.layer_bytes)  # the bytes of the emulated model
    planned = compare(small, there, costs, [drawn], seed=given.seed, plans=PLANS).outcomes[drawn].relative
    committed = of.steps * usual / there.seconds
    print(
        f"{of.mode:<11}{of.there.losses:>6}{of.moves:>7}{of.steps:>10.0f}{committed:>8.3f}{simulated:>11.3f}"
        f"{planned:>12.3f}{of.load:>7.1f}",
        flush=True,
    )
    return {
        "rebalance": of.mode, "kills": of.there.losses, "moves": of.moves, "steps": of.steps, "committed": committed,
        "simulated": simulated, "planned": planned, "load": of.load,
    }  # fmt: skip


def replayed(job: Job, there: Availability, folder: Path, more: Sequence[str], given: argparse.Namespace) -> Replayed:
    settings = [f"model.layers={given.layers}", *more, *given.overrides]
    return replay(job, there, there.seconds, given.seed, folder, settings, forked)


@contextmanager
def forked(settings: list[str], workers: int, log: Path) -> Iterator[None]:
    """A `Launch` without torchrun, so that 24 processes need not import torch."""
    log.touch()
    with Zygote() as zygote, zygote.run(settings) as running:
        try:
            yield
        except RuntimeError:
            print(running.output[-2000:], file=sys.stderr)
            raise


if __name__ == "__main__":
    main()
