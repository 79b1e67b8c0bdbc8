"""Compares even layers with model.split=auto, for a model whose head takes as long as several layers.

    python bench/split.py [--measure] [--sequence 128] [--steps 8] [SETTING ...]

gpt124m on 2 pipelines x 4 stages. In the first table, F, I and W of a stage are in proportion to the number of its
weights in matrix products. The unit is the time of an average stage, as in `recycle_pp.plan`. A step is the planned
period, and bubbles are the planned idle time of the workers.

--measure: the second table has durations of real ops on this machine. For each layout, one pipeline trains `--steps`
steps of one micro-batch, so that only one op runs at a time. The plan of 2 x 4 then uses the durations in profile.json.
With several micro-batches eight workers would share the cores of one machine, which hides the bubbles.
"""

from __future__ import annotations

import argparse
import json
import os

from recycle_schedules import Problem, plan

from recycle_pp.config.compose import compose
from recycle_pp.config.settings import Settings
from recycle_pp.drawing.chart import Chart
from recycle_pp.drawing.measures import Measures
from recycle_pp.fitting.first_layout import counted, with_first_layout
from recycle_pp.fitting.model_layers import ModelLayers
from recycle_pp.fitting.problem import initial_problem
from recycle_pp.testing.local_cluster import Zygote

JOB = ["model=gpt124m", "parallel=2x4"]
SPLITS = {"even": "null", "auto": "auto"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--sequence", type=int, default=128, help="tokens of a sample, with --measure")
    parser.add_argument("--steps", type=int, default=8, help="with --measure")
    parser.add_argument("overrides", nargs="*", default=[])
    given = parser.parse_args()
    settings = {name: of(split, given.overrides) for name, split in SPLITS.items()}
    table("by weights", "slots", settings, {name: counted(initial_problem(s), s) for name, s in settings.items()})
    if given.measure:
        measured = {name: measure(of_one, given) for name, of_one in settings.items()}
        table(f"measured, load {os.getloadavg()[1]:.1f}", "s", settings, measured)


def of(split: str, overrides: list[str]) -> Settings:
    settings = compose([*JOB, f"model.split={split}", *overrides]).with_values({"schedule.profile_steps": 0})
    return with_first_layout(settings)


def measure(settings: Settings, given: argparse.Namespace) -> Problem:
    """The job's problem, with the durations of ops that ran alone in the same layout."""
    layers = ",".join(map(str, ModelLayers(settings).start))
    alone = [
        f"parallel=1x{settings.parallel.stages}", "parallel.microbatches=1", f"model.sequence={given.sequence}",
        f"run.steps={given.steps}", "run.validate_every=0", f"model.split=[{layers}]",
        "schedule.rebalance=never",
    ]  # fmt: skip
    with Zygote() as zygote, zygote.run([*JOB, *given.overrides, *alone]) as job:
        if job.wait(900):
            raise SystemExit(job.output)
        profile = json.loads(job.run.profile.read_text())
    return initial_problem(settings).replace(durations=profile["durations_seconds"])


def table(title: str, unit: str, settings: dict[str, Settings], problems: dict[str, Problem]) -> None:
    """Prints a row for each layout: layers, F + I + W of each stage, step, bubbles."""
    print(f"{title:<22}{'layers':<12}{'F + I + W by stage':<30}{'step':>12}{'bubbles':>10}")
    for name, problem in problems.items():
        found = plan(problem, seconds=0.5)
        work = [sum(problem.per_stage(kind)[s] for kind in "FIW") for s in range(problem.stages)]
        layers = " ".join(map(str, ModelLayers(settings[name]).start))
        ops = " ".join(f"{seconds:.3g}" for seconds in work)
        idle = Measures.of(Chart.of(found)).idle
        print(f"{name:<22}{layers:<12}{ops:<30}{found.value:>9.4g} {unit:<5}{idle:>7.1%}", flush=True)


if __name__ == "__main__":
    main()
