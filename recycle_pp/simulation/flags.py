"""The flags of `recycle_pp.simulate`: machines, a job, costs.

given = parser(__doc__).parse_args()
job_of(given, microbatches=32), availability_of(given, workers=24), costs_of(given)    # ValueError: one sentence
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from recycle_pp.command import parser_of
from recycle_pp.config.sizes import parse_size
from recycle_pp.config.times import parse_seconds
from recycle_pp.fitting.problem_source import parse_durations, parse_memory

from . import measured
from .availability import DAY, Availability, draw, read
from .costs import Costs, Recovery
from .hardware import GPUS, job_on
from .job import Job
from .moves import Moves
from .policies import NAMES

TIMES = ("start", "restart", "checkpoint", "swap", "quorum", "reconfigure", "outage")
"""The fields of Costs in seconds. Each has a flag of the same name."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """The parser with all flags of the command."""
    parser = parser_of("simulate", description)
    add = parser.add_argument_group("machines").add_argument
    add("--trace", help="CSV file: hour,count or hour,machine,up (also minute, second)")
    add("--mtbf", help="without a trace: mean time until a machine fails (2h)")
    add("--repair", default="20m", help="mean time until a failed machine, or its replacement, is up (default 20m)")
    add("--days", type=float, default=30.0, help="without a trace: length of the simulation in days (default 30)")
    add("--machines", type=int, help="number of machines (default: pipelines x stages, or the maximum of the trace)")
    add("--shape", type=float, default=1.0, help="shape of the Weibull distribution of failures (default 1)")
    add(
        "--group",
        nargs="+",
        default=[],
        metavar="SIZE:MTBF",
        help="machines that fail together (8:10d)",
    )
    add("--seed", type=int, default=0, help="seed of the failures")
    add = parser.add_argument_group("job").add_argument
    add("--pipelines", type=int)
    add("--stages", type=int)
    add("--microbatches", type=int, nargs="+", help="micro-batches per pipeline; one table compares several values")
    add("--layers", type=int, help="layers of the model, for policies that move layers between stages (default 96)")
    add("--memory", metavar="1f1b+2", default="none", help="micro-batches in flight (default none: no limit)")
    add("--optimizer", choices=("staggered", "barrier"), default="staggered")
    add(
        "--durations",
        metavar="F=0.1,I=0.1,W=0.1",
        help="seconds of each op: one number, or one for each stage (F=1/1/2/1)",
    )
    add("--profile", metavar="RUN", help="a run folder, for its measured durations, shape and sizes")
    add("--model", help="a preset of the trainer (gpt124m, llama1b) on a --gpu, from its data sheet")
    add("--gpu", choices=tuple(GPUS))
    add("--microbatch-size", type=int, default=1, help="with --model: samples in a micro-batch (default 1)")
    add("--utilization", type=float, default=0.4, help="with --model: share of the GPU's peak speed (default 0.4)")
    add = parser.add_argument_group("costs").add_argument
    usual = Costs()
    add("--state", help="bytes of a worker's state (default 16GB, or the model's)")
    add("--bandwidth", default="2.5GB", help="bytes per second to a joining worker (default 2.5GB)")
    for name in TIMES:
        add(f"--{name}", default=f"{getattr(usual, name):g}s", help=f"(default {getattr(usual, name):g}s)")
    add("--recovery", help="an output file of bench/recovery.py, instead of the measurements for this version")
    add(
        "--moves",
        metavar="RUN",
        help="measured moves of layers: a run folder, or a file of bench/moves.py (default: those of this version)",
    )
    add = parser.add_argument_group("result").add_argument
    add("--policy", default="all", help=f"one or more of {', '.join(NAMES)}, comma-separated (default all)")
    add("--plans", type=int, default=64, help="maximum number of memberships to plan (default 64)")
    add("--json", metavar="FILE", help="write the figures of every policy")
    add("--replay", nargs="?", const="4m", metavar="TIME", help="run a real, emulated job through the trace in TIME")
    add(
        "--prices",
        metavar="FILE",
        help="CSV: kind, price, interruptions_per_hour[, speed, limit]",
    )
    add("--best", action="store_true", help="find the best pipelines x stages x micro-batches for these machines")
    add("--capacity", help="with --best: bytes that a machine has for a worker's state (60GB)")
    add(
        "--fleet",
        type=float,
        metavar="PER_HOUR",
        help="find the cheapest machines of --prices for this many tokens per hour",
    )
    add(
        "--out",
        action="append",
        default=[],
        metavar="FILE",
        help="write a page (.html) or picture (.svg, .png, .pdf): throughput, machines, losses; may be repeated",
    )
    return parser


def policies_of(text: str) -> list[str]:
    """The policies given by --policy. Raises ValueError for an unknown policy."""
    names = list(NAMES) if text == "all" else text.split(",")
    for name in names:
        if name not in NAMES:
            raise ValueError(f"--policy: {name!r} is not one of {', '.join(NAMES)}, or all")
    return names


def job_of(given: argparse.Namespace, microbatches: int | None) -> Job:
    """The job of --profile, of --model and --gpu, or of --durations.

    microbatches: number per pipeline; None: as in the profile's run
    """
    for name in ("pipelines", "stages", "layers", "microbatch_size"):
        if getattr(given, name) is not None and getattr(given, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    if microbatches is not None and microbatches < 1:
        raise ValueError("--microbatches must be at least 1")
    state = parse_size(given.state, "--state") if given.state else None
    shape = {"pipelines": given.pipelines, "stages": given.stages, "microbatches": microbatches}
    other = {"memory": parse_memory(given.memory), "optimizer": given.optimizer}
    if given.profile:
        _refuse(given, ("model", "gpu", "durations"), "--profile has the measured durations")
        return measured.job_of(given.profile, **shape, layers=given.layers, worker_bytes=state, **other)
    missing = [f"--{name}" for name, value in shape.items() if value is None]
    if missing:
        raise ValueError(f"{missing[0]} is needed")
    if given.model or given.gpu:
        if not (given.model and given.gpu):
            raise ValueError("--model and --gpu must be given together")
        _refuse(given, ("layers", "durations"), "--model and --gpu determine the layers and their durations")
        size = {"microbatch_size": given.microbatch_size, "utilization": given.utilization}
        return job_on(given.model, given.gpu, **shape, **size, worker_bytes=state, **other)
    durations = parse_durations(given.durations) if given.durations else None
    return Job.of(**shape, layers=given.layers or 96, durations=durations, worker_bytes=state or 16e9, **other)


def _refuse(given: argparse.Namespace, names: Iterable[str], reason: str) -> None:
    """Raises ValueError if one of these flags is given. reason: sentence that names the flags that replace them."""
    for name in names:
        if getattr(given, name) is not None:
            raise ValueError(f"--{name} is not allowed here, because {reason}")


def availability_of(given: argparse.Namespace, workers: int) -> Availability:
    """The machines of the trace, or random ones. workers: default number of machines."""
    if (given.trace is None) == (given.mtbf is None):
        raise ValueError("--trace FILE or --mtbf TIME must describe the machines")
    if given.machines is not None and given.machines < 1:
        raise ValueError("--machines must be at least 1")
    if not 0 < given.days < math.inf:
        raise ValueError(f"--days must be a number above 0, not {given.days:g}")
    if given.trace:
        return read(given.trace, seed=given.seed, machines=given.machines)
    return draw(
        machines=given.machines or workers, seconds=given.days * DAY, mtbf=parse_seconds(given.mtbf, "--mtbf"),
        repair=parse_seconds(given.repair, "--repair"), seed=given.seed, shape=given.shape,
        groups=[_group(text) for text in given.group],
    )  # fmt: skip


def _group(text: str) -> tuple[int, float]:
    size, _, between = text.partition(":")
    if not size.isdigit() or not int(size) or not between:
        raise ValueError(f"--group: {text!r} is not of the form SIZE:MTBF, like 8:10d")
    return int(size), parse_seconds(between, "--group SIZE:MTBF")


def costs_of(given: argparse.Namespace) -> Costs:
    """The costs. Recoveries and moves of layers are measured; the other costs are set by flags."""
    times: dict[str, Any] = {name: parse_seconds(getattr(given, name), f"--{name}") for name in TIMES}
    costs = Costs(bandwidth=parse_size(given.bandwidth, "--bandwidth"), **times)
    if given.recovery:
        costs = replace(costs, recovery=Recovery.load(given.recovery))
    return replace(costs, moves=Moves.load(given.moves)) if given.moves else costs
