"""Work lost to deaths: the committed share, and the lost seconds by cause, each with a lower bound.

    python bench/lost_work.py [--mtbf 5] [--seconds 120] [--launcher torchrun|fork] [SETTING ...]
    python bench/lost_work.py --run bench/out/peers/5-recycle_pp-1/run          # a run that has ended

Twelve workers (3 x 4, emulated 20 ms ops) get a SIGKILL every `--mtbf` seconds on average (`bench/recovery.py`). The
usual time of a step is the median of all steps that no death touched. The table shows the time beyond that median, in
milliseconds per death:

- *broken*: in steps in which a worker died. Its parts: *bound*, the minimum that the planner's bound allows (the time
  until the death, plus the bound for the remaining ops and the dead worker's lost ops); *plan*, the excess of the plan
  over that bound; *stall*, the time until the last survivor runs again; and the rest.
- *away*: in steps without the worker from start to end. *bound*: the planner's lower bound for such a step.
- *rejoin*: in steps at whose start a worker rejoined. All workers wait for it; the bound is 0.
- *other*: in all other steps, for instance because new processes import torch on the same cores.

The share is the time that the same steps would have taken without deaths, divided by the time that they took. *At
best*: the share if only the bounds were lost.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from recovery import COMMON, COMPUTE, LAUNCHERS, WORKERS, kill_at_random
from recycle_schedules import Problem, Worker, plan
from results import save

from recycle_pp.config.compose import compose
from recycle_pp.fitting.problem import initial_problem
from recycle_pp.telemetry.run_folder import RunFolder

Json = dict[str, Any]
SETTLE = 5  # first steps, left out because the job measures its op durations in them
PARTS = ("broken", "  bound", "  plan", "  stall", "  rest", "away", "  bound ", "rejoin", "other")


@dataclass(frozen=True)
class Run:
    """The committed steps and the events of a run, and its problem without deaths."""

    steps: list[Json]
    events: list[Json]
    problem: Problem

    def of(self, name: str) -> list[Json]:
        return [event for event in self.events if event["event"] == name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="analyse this run folder instead of running a job")
    parser.add_argument("--mtbf", type=float, default=5.0, help="seconds between two deaths, on average")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--launcher", choices=list(LAUNCHERS), default="torchrun")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("overrides", nargs="*", default=[])
    given = parser.parse_args()
    if given.run:
        row = lost(read(RunFolder(given.run), [*COMMON, *COMPUTE["sleep"]]))
    else:
        with tempfile.TemporaryDirectory(prefix="recycle-bench-") as folder:
            run, settings = RunFolder(Path(folder) / "run"), [*COMMON, *COMPUTE["sleep"], *given.overrides]
            with LAUNCHERS[given.launcher]([*settings, f"run.dir={run.path}"]):
                kill_at_random(run, given, random.Random(given.seed))
            row = lost(read(run, settings))
    show(row)
    arguments = {key: str(value) for key, value in vars(given).items()}
    save("lost_work.json", row | {"arguments": arguments})


def read(run: RunFolder, settings: Sequence[str]) -> Run:
    problem = initial_problem(compose(list(settings)))
    steps = [line for line in run.lines(run.metrics) if line["step"] >= SETTLE]
    return Run(steps, run.lines(run.events), problem)


def lost(run: Run) -> Json:
    """The lost seconds from the first death on, by part, and the table's other figures."""
    resumed, rejoined = run.of("resumed"), {event["step"] for event in run.of("rejoined")}
    broken = {event["step"] for event in resumed}
    touched = {step + n for step in broken | rejoined for n in (-1, 0, 1)}
    usual = statistics.median(line["step_seconds"] for line in run.steps if line["step"] not in touched)
    begin = min(broken)
    parts = dict.fromkeys(PARTS, 0.0)
    lines = [line for line in run.steps if line["step"] >= begin]
    for line in lines:
        excess = line["step_seconds"] - usual
        if line["step"] in broken:
            parts["broken"] += excess
            for name, seconds in of_broken(run, line, usual).items():
                parts[name] += seconds
        elif line["step"] in rejoined:
            parts["rejoin"] += excess
        elif line["live_workers"] < WORKERS:
            parts["away"] += excess
            parts["  bound "] += least(run.problem, dead_at(run, line)) - least(run.problem, frozenset())
        else:
            parts["other"] += excess
    parts["  rest"] = parts["broken"] - sum(parts[name] for name in ("  bound", "  plan", "  stall"))
    deaths, seconds = len(run.of("death_detected")), sum(line["step_seconds"] for line in lines)
    least_lost = parts["  bound"] + parts["  bound "]
    return {
        "deaths": deaths, "steps": len(lines), "seconds": seconds, "usual": usual,
        "parts": {name: value / deaths for name, value in parts.items()},
        "share": len(lines) * usual / seconds,
        "best": len(lines) * usual / (len(lines) * usual + least_lost),
    }  # fmt: skip


def of_broken(run: Run, line: Json, usual: float) -> dict[str, float]:
    """The parts of a broken step whose length is known. If more than one worker died, the last death counts."""
    found = [event for event in run.of("resumed") if event["step"] == line["step"]]
    died = found[-1]["time"] - found[-1]["stall_seconds"] - (line["time"] - line["step_seconds"])
    return {
        "  bound": max(0.0, max(0.0, died) + found[-1]["left_bound_seconds"] - usual),
        "  plan": found[-1]["left_seconds"] - found[-1]["left_bound_seconds"],
        "  stall": sum(event["stall_seconds"] for event in found),
    }


def dead_at(run: Run, line: Json) -> frozenset[Worker]:
    """The workers that were dead at the commit of this step."""
    dead: set[Worker] = set()
    for event in run.events:
        if event["event"] in ("death_detected", "rejoined") and event["time"] <= line["time"]:
            worker = Worker(*map(int, event["worker"].split(".")))
            (dead.add if event["event"] == "death_detected" else dead.discard)(worker)
    return frozenset(dead)


@cache
def least(problem: Problem, dead: frozenset[Worker]) -> float:
    """With deaths: the lower bound of a step. Without: the planned period, which takes the usual time."""
    made = plan(problem.replace(failed=sorted(dead), backward="mixed") if dead else problem)
    assert made.period is not None
    return made.lower_bound if dead else made.period


def show(row: Json) -> None:
    print(f"{row['deaths']} deaths in {row['steps']} steps, {row['seconds']:.0f} s; others take {row['usual']:.3f} s")
    for name in PARTS:
        print(f"{name:<10}{1e3 * row['parts'][name]:>8.0f} ms per death")
    print(f"lost: {1e3 * sum(row['parts'][name] for name in PARTS if name[0] != ' '):.0f} ms per death")
    print(f"share of the fault-free rate: {row['share']:.3f}; at best {row['best']:.3f}")


if __name__ == "__main__":
    main()
