"""Simulates weeks on unreliable machines before you rent them, and compares the throughput of recovery policies.

    python -m recycle_pp.simulate --trace spot.csv --pipelines 6 --stages 4 --microbatches 32
    python -m recycle_pp.simulate --mtbf 2h --repair 20m --days 30 --pipelines 6 --stages 4 --microbatches 32 --seed 1
    python -m recycle_pp.simulate --trace spot.csv --pipelines 6 --stages 4 --microbatches 12 32 64
    python -m recycle_pp.simulate --trace spot.csv --profile runs/mine --out report.html

Each line of the CSV trace contains a time and the number of machines from then on, or a time, a machine's name and 1 or
0 (up or down). Without a trace, machines fail at random (--mtbf, per machine). --seed selects the machines that die. A
step takes as long as the planner's plan for the live workers. If a death interrupts the step, the rules of the recovery
protocol determine its length, with measured recovery times. docs/simulate.md explains the policies, the assumptions and
the accuracy.

Results are relative to a 1F1B job without losses. All layers are equal, with F = I = W = 100 ms per stage, unless
--durations, --profile, or --model and --gpu set other values.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from rich.console import Console

from recycle_pp.command import exit_code
from recycle_pp.config.sizes import parse_size
from recycle_pp.config.times import parse_seconds
from recycle_pp.fitting.problem_source import compile_planner
from recycle_pp.simulation import flags, page, picture, report
from recycle_pp.simulation.availability import DAY, Availability, draw
from recycle_pp.simulation.compare import Comparison, compare
from recycle_pp.simulation.costs import Costs
from recycle_pp.simulation.fleet import cheapest, demand
from recycle_pp.simulation.job import Job
from recycle_pp.simulation.measured import job_of
from recycle_pp.simulation.policies import DEFAULT, MOVING
from recycle_pp.simulation.prices import Kind, read_prices
from recycle_pp.simulation.replay import replay
from recycle_pp.simulation.shapes import best_shapes


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0; 1 if a replayed job does not start; 2 after printing one sentence about an error; 130
    if interrupted."""
    return exit_code(lambda: _run(flags.parser(__doc__).parse_args(argv)))


def _run(given: argparse.Namespace) -> int:
    policies = flags.policies_of(given.policy)
    counts = given.microbatches or [None]
    if given.json and len(counts) > 1:
        raise ValueError("--json allows a single value of --microbatches")
    if given.out and len(counts) > 1:
        raise ValueError("--out allows a single value of --microbatches")
    for out in given.out:
        if Path(out).suffix not in (".html", ".svg", ".png", ".pdf"):
            raise ValueError(f"--out {out}: the name must end in .html, .svg, .png or .pdf")
    jobs = [flags.job_of(given, count) for count in counts]
    costs, kinds = flags.costs_of(given), read_prices(given.prices) if given.prices else []
    if given.fleet:
        return _fleet(given, jobs[0], costs, kinds)
    if kinds and given.trace is None and given.mtbf is None:
        return _each_kind(given, jobs[0], costs, policies, kinds)
    there = flags.availability_of(given, jobs[0].workers)
    if given.best:
        return _best(given, jobs[0], there, costs)
    if given.replay:
        return _replay(given, jobs[0], there, costs)
    compile_planner()
    found = [compare(job, there, costs, policies, seed=given.seed, plans=given.plans) for job in jobs]
    if given.json:
        Path(given.json).write_text(json.dumps(report.as_json(found[0], kinds), indent=1) + "\n")
    for out in given.out:
        (page if out.endswith(".html") else picture).save(found[0], out)
    _show(found)
    if kinds:
        _console().print(report.price_table([(kind, found[0]) for kind in kinds]))
    return 0


def _each_kind(given: argparse.Namespace, job: Job, costs: Costs, policies: list[str], kinds: Sequence[Kind]) -> int:
    """Prints a comparison for every kind of machine, with its own interruptions and speed."""
    if given.json or given.out:
        raise ValueError("--prices: --json and --out need --trace or --mtbf")
    compile_planner()
    found = []
    for kind in kinds:
        there = draw(
            machines=given.machines or job.workers, seconds=given.days * DAY, mtbf=kind.mtbf,
            repair=parse_seconds(given.repair, "--repair"), seed=given.seed, shape=given.shape,
        )  # fmt: skip
        mine = job.faster(kind.speed)
        found.append((kind, compare(mine, there, costs, policies, seed=given.seed, plans=given.plans)))
    _console().print(report.price_table(found))
    for sentence in report.remarks(found[0][1]):
        print(sentence)
    return 0


def _best(given: argparse.Namespace, job: Job, there: Availability, costs: Costs) -> int:
    """Prints the shapes of the job, fastest first."""
    if not given.capacity:
        raise ValueError("--best needs --capacity, because one stage is always best without a limit on memory")
    policy = MOVING if given.policy == "all" else flags.policies_of(given.policy)[0]
    compile_planner()
    found = best_shapes(job, there, costs, policy, capacity=parse_size(given.capacity, "--capacity"), seed=given.seed)
    _console().print(report.shape_table(found))
    print(f"{policy}, {there.machines} machines, {there.mean:.1f} available on average; the others are spares")
    if policy == MOVING:
        print(
            f"the trainer moves layers with schedule.rebalance=auto; --policy {DEFAULT} ranks the shapes without that"
        )
    return 0


def _fleet(given: argparse.Namespace, job: Job, costs: Costs, kinds: Sequence[Kind]) -> int:
    """Prints the cheapest machines for a target speed."""
    if not kinds:
        raise ValueError("--fleet needs --prices")
    compile_planner()
    need = demand(job, costs, given.fleet)
    repair = parse_seconds(given.repair, "--repair")
    fleet = cheapest(kinds, need.machines, repair=repair, lost=need.lost, least=job.stages)
    for kind, count in zip(kinds, fleet.counts, strict=True):
        print(f"{count:6} x {kind.name} at ${kind.dollars_an_hour:g} an hour")
    thing = "tokens" if job.tokens else "micro-batches"
    million = 1e6 * fleet.dollars_an_hour / given.fleet
    print(f"${fleet.dollars_an_hour:.2f} an hour, ${million:.4g} a million {thing}")
    print(
        f"{fleet.machines:.1f} machines up on average, {fleet.interruptions:.2f} interruptions an hour, "
        f"each costs the job {need.lost:.1f} s; needed: {need.machines:.1f} machines of speed 1 without "
        f"interruptions, which process {given.fleet:,.0f} {thing} an hour in the plan of {job.pipelines} x {job.stages}"
    )
    return 0


def _console() -> Console:
    # a file or a pipe has no width of its own
    return Console(width=None if sys.stdout.isatty() else 160)


def _replay(given: argparse.Namespace, job: Job, there: Availability, costs: Costs) -> int:
    """Runs a real job through the compressed trace, and simulates the same job. Returns the exit code: 0 even if
    the two results differ, 1 if the job did not start."""
    seconds = parse_seconds(given.replay, "--replay")
    with tempfile.TemporaryDirectory(prefix="recycle-replay-") as folder:
        try:
            real = replay(job, there, seconds, given.seed, Path(folder))
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        measured = job_of(real.run.path, memory=job.problem.memory_limit, optimizer=given.optimizer)
    compile_planner()
    # A replay kills only processes, so a replacement does not have to wait for the start of a machine.
    costs = replace(costs, start=median(costs.recovery.returns))
    found = compare(measured, real.there, costs, ["respawned", "bound"], seed=given.seed, plans=given.plans)
    _show([found])
    steps = found.outcomes["respawned"].steps
    print(
        f"replayed: {there.seconds / seconds:.0f} times as fast, {real.there.losses} kills; {real.steps:.0f} steps "
        f"measured, {steps:.1f} simulated: {steps / max(1.0, real.steps) - 1:+z.1%}"
    )
    return 0


def _show(found: list[Comparison]) -> None:
    console = _console()
    console.print(report.table(found))
    for sentence in (*(report.summary(found[0]) if len(found) == 1 else ()), *report.remarks(found[0])):
        console.print(sentence, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
