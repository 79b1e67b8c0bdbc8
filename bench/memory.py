"""Compares planned and measured memory, messages and CPU time of workers, in real jobs of two stages.

    python bench/memory.py [--pipelines 2 4] [--copies 0 2 3] [--steps 3] [--rounds 3] [numerics=bf16 ...]
    python bench/memory.py --shapes 80GB                # no job: the tables of docs/measured.md, from `plan --memory`

All memory figures are for the worker with the most memory. A job with 0 copies is unsharded.

    planned      peak of `model.memory`, for the stage's worker that saves the checkpoint
    allocated    peak bytes of tensors, each on its own pages
    rss          the kernel's peak, with `parallel.memory`; compared with planned plus the bare process (`PROCESS`)
    sent         bytes of a step, compared with `sent_bytes`
    less         bytes sent by the unsharded job, divided by the bytes sent by this one
    cpu          CPU seconds of a step: median over workers, steps (without the first) and rounds; then the ratio to
                 the unsharded jobs, which alternate with this one
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from results import save

from recycle_pp.config.compose import compose
from recycle_pp.config.sizes import format_size, parse_size
from recycle_pp.fitting.footprint import needs_of
from recycle_pp.fitting.outlook import Outcome, outlook
from recycle_pp.model.memory import PROCESS, sent_bytes, stage_memory
from recycle_pp.testing.local_cluster import Zygote

JOB = [
    *("model.layers=6", "model.width=384", "model.heads=6", "model.kv_heads=6", "model.ffn=1344"),
    *(
        "model.vocabulary=8192",
        "model.sequence=128",
        "model.split=null",
        "parallel.stages=2",
        "parallel.microbatches=4",
    ),
    *("numerics=reproducible", "run.validate_every=0", "schedule.profile_steps=1", "run.device=cpu", "run.standby=off"),
    *("control.suspicion=120", "checkpoint.minutes=0", "parallel.memory=8GB"),
]
LARGE = ["parallel.microbatches=32", "parallel.microbatch_size=1", "numerics=bf16", "numerics.reproducible=true"]
SHAPES = {"llama8b": [(4, 4), (8, 4), (8, 8)], "llama70b": [(4, 8), (8, 8), (8, 16), (16, 16)]}
HEAD = "{:>3}{:>8}{:>7}  {:>9}{:>11}{:>7}  {:>9}{:>9}{:>7}  {:>9}{:>9}{:>7}{:>7}{:>8}{:>7}"
Records = dict[str, list[dict[str, float]]]  # worker -> its reports, one after each step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipelines", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--copies", type=int, nargs="+", default=[0, 2, 3])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument(
        "--shapes", metavar="80GB", help="print whether Llama's shapes fit into this memory, and run nothing"
    )
    arguments = parser.parse_intermixed_args()
    if arguments.shapes:
        shapes(parse_size(arguments.shapes), arguments.overrides)
        return
    names = ("D", "copies", "stage", "planned", "allocated", "", "planned", "rss", "", "formula", "sent", "", "less")
    print(HEAD.format(*names, "cpu s", ""))
    rows: list[dict[str, Any]] = []
    with Zygote(preload=Path(__file__).parent / "memory_probe.py") as zygote:
        for pipelines in arguments.pipelines:
            jobs = []
            for copies in (k for k in arguments.copies if k <= pipelines):
                words = [*JOB, f"parallel.pipelines={pipelines}", f"run.steps={arguments.steps}"]
                words += [f"parallel.sharded={str(copies > 0).lower()}", f"parallel.optimizer_copies={copies}"]
                jobs.append([*words, *arguments.overrides])
            rows += measure(zygote, jobs, arguments.rounds)
    save("memory.json", rows)


def shapes(capacity: float, overrides: list[str]) -> None:
    """Prints a Markdown table. For each shape it shows the stage that needs the most memory with all workers alive, and
    the bytes of its workers."""
    parts = ("weights", "optimizer state", "sums", "replay log")
    print(f"| model | D x P | copies | {' | '.join(parts)} | one micro-batch | in flight | all alive | one | two |")
    print("|" + "---|" * (len(parts) + 8))
    for model, sizes in SHAPES.items():
        for (pipelines, stages), copies in itertools.product(sizes, (0, 2, 3)):
            words = [f"model={model}", f"parallel.pipelines={pipelines}", f"parallel.stages={stages}", *LARGE]
            words += [f"parallel.sharded={str(copies > 0).lower()}", f"parallel.optimizer_copies={copies}", *overrides]
            settings = compose(words)
            whole, *_ = found = outlook(settings, capacity, "cuda")
            row = max(whole.rows, key=lambda row: row.bytes)
            memory = stage_memory(settings, row.stage, device="cuda", recompute=row.recompute)
            cells = [format_size(row.parts[name]) for name in parts]
            cells += [format_size(memory.each(row.whole)), f"{row.in_flight:g} of {row.wanted:g}"]
            cells += [("fits" if of.fits else "no") + slower(of, whole) for of in found]
            print(f"| {model} | {pipelines} x {stages} | {copies} | {' | '.join(cells)} |", flush=True)


def slower(outcome: Outcome, whole: Outcome) -> str:
    if not (outcome.dead and outcome.period and whole.period):
        return ""
    return f", {100 * (outcome.period / whole.period - 1):+z.0f} %"


def measure(zygote: Zygote, jobs: list[list[str]], rounds: int) -> list[dict[str, Any]]:
    """A row for each job and stage. Each row has ratios to the first job."""
    alone = [run(zygote, words, "allocator") for words in jobs]
    usual = [[run(zygote, words, "rss") for words in jobs] for _ in range(rounds)]  # in turn, because load varies
    rows: list[dict[str, Any]] = []
    for number, words in enumerate(jobs):
        settings, found = compose(words), [jobs_of_round[number] for jobs_of_round in usual]
        for stage, parts in enumerate(needs_of(settings, "cpu")):
            planned = sum(parts.values())
            row: dict[str, Any] = {"D": settings.parallel.pipelines, "copies": settings.parallel.copies, "stage": stage}
            row |= {"planned": planned, "allocated": peak([alone[number]], stage, "allocated")}
            row |= {"planned_rss": PROCESS + planned, "rss": peak(found, stage, "rss")}
            row |= {"formula": sent_bytes(settings, stage), "sent": a_step(found, stage, "sent")}
            row |= {"cpu": a_step(found, stage, "cpu"), "parts": parts}
            first = next((of for of in rows if of["stage"] == stage), row)
            rows.append(row | {"less": first["sent"] / row["sent"], "cpu_ratio": row["cpu"] / first["cpu"]})
            show(rows[-1])
    return rows


def run(zygote: Zygote, words: list[str], probe: str) -> Records:
    with tempfile.TemporaryDirectory() as folder:
        environment = {"RECYCLE_PROBE": probe, "RECYCLE_PROBE_FOLDER": folder}
        with zygote.run(words, environment) as job:
            if job.wait(580):
                raise SystemExit(job.output)
        return {path.stem: json.loads(path.read_text()) for path in Path(folder).glob("*.json")}


def peak(found: list[Records], stage: int, key: str) -> float:
    return max(record[key] for of in records(found, stage) for record in of)


def a_step(found: list[Records], stage: int, key: str) -> float:
    """The median growth of a figure per step, over the stage's workers and all steps but the first."""
    return median(after[key] - before[key] for of in records(found, stage) for before, after in pairwise(of))


def records(found: list[Records], stage: int) -> list[list[dict[str, float]]]:
    return [of for records in found for worker, of in records.items() if worker.endswith(f".{stage}")]


def show(row: dict[str, Any]) -> None:
    pairs = [("planned", "allocated"), ("planned_rss", "rss"), ("formula", "sent")]
    cells = [text for a, b in pairs for text in (format_size(row[a]), format_size(row[b]), f"{row[b] / row[a]:.2f}")]
    ratios = f"{row['less']:.2f}", f"{row['cpu']:.2f}", f"{row['cpu_ratio']:.2f}"
    print(HEAD.format(row["D"], row["copies"], row["stage"], *cells, *ratios), flush=True)


if __name__ == "__main__":
    main()
