"""Writes a commented file with every setting of a run, for the machine it runs on.

    recycle init run.yaml                                        # the best shape for the workers of this machine
    recycle init run.yaml model=gpt124m data.path=corpus.jsonl   # with these settings
    recycle init run.yaml --workers 8 model=llama1b              # for a different number of workers on this machine
    recycle train run.yaml

There is one worker for each GPU. Without GPUs there is one for each core, at least 2 and at most 8. A shape is a number
of pipelines and a number of stages for these workers. The comment at the top of the file compares all shapes, as
planned by `recycle plan`. With `parallel=DxP`, you choose the shape yourself.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recycle_pp.command import exit_code
from recycle_pp.config.checks import check_ranges
from recycle_pp.config.compose import chosen, compose
from recycle_pp.config.run_file import commented
from recycle_pp.config.settings import Settings
from recycle_pp.config.sizes import format_size, parse_size
from recycle_pp.fitting.machine import gpus, memory_of_a_worker
from recycle_pp.fitting.problem_source import compile_planner
from recycle_pp.fitting.shapes import Shape, best, shapes

FEWEST, MOST = 2, 8  # limits on the number of workers on a machine without GPUs


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 after printing one sentence about a mistake."""
    return exit_code(lambda: _run(_parser().parse_intermixed_args(arguments)), "recycle_pp")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="recycle init", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", help="the file to write, for instance run.yaml; it must not exist")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings, as for recycle train")
    parser.add_argument("--workers", type=int, metavar="N", help="number of workers on this machine")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    path = Path(arguments.file)
    if path.suffix not in (".yaml", ".yml"):
        raise ValueError(f"the file's name must end with .yaml, not {arguments.file!r}")
    if path.exists():
        raise ValueError(f"{path} exists; remove it, or choose a different file")
    settings, comment = fitted(arguments.settings, arguments.workers)
    path.write_text(commented(settings, comment))
    print("\n".join(comment))
    print(f"\nwrote {path}; recycle train {path} trains with {settings.parallel.pipelines}x{settings.parallel.stages}")
    return 0


def fitted(words: Sequence[str], workers: int | None = None) -> tuple[Settings, list[str]]:
    """The settings for this machine, and lines of a comment that explain the choice.

    words    settings of the command line, which override the choice
    workers  number of workers; None: as many as this machine has GPUs or cores
    """
    settings, given = compose(words), chosen(words)
    check_ranges(settings)
    found = [] if settings.run.device == "cpu" else gpus()
    cores = len(os.sched_getaffinity(0))
    shape = {"parallel.pipelines", "parallel.stages"} & given
    if shape:
        workers = settings.parallel.pipelines * settings.parallel.stages
    elif workers is None:
        workers = len(found) or min(max(cores, FEWEST), MOST)
    if workers < 1:
        raise ValueError(f"--workers must be at least 1, not {workers}")
    memory = settings.parallel.memory if "parallel.memory" in given else "auto"
    if memory == "auto":
        memory = memory_of_a_worker(settings.run.device, workers)
    machine = f"{len(found)} GPUs" if found else f"{cores} cores and no GPU"
    room = f", with {memory} each" if memory else ""
    comment = [f"Made by recycle init for {workers} workers on a machine with {machine}{room}."]
    values: dict[str, Any] = {"parallel.memory": memory}
    if "run.dir" not in given:
        values["run.dir"] = Settings().run.dir  # the default, which is a new folder at each start
    if not settings.model.own:
        comment.append(f"The bytes and times of model.kind={settings.model.kind} are known only while it runs.")
    elif memory is None and not shape:
        comment.append("The shapes are not compared, because the memory of a worker is not known.")
    if not shape and (memory is None or not settings.model.own):
        stages = 2 if workers > 2 and workers % 2 == 0 else 1
        values |= {"parallel.pipelines": workers // stages, "parallel.stages": stages}
    elif not shape and memory is not None:
        compile_planner()
        microbatches = settings.parallel.microbatches if "parallel.microbatches" in given else None
        table = shapes(settings, workers, parse_size(memory), "cuda" if found else "cpu", microbatches)
        choice = best(table)
        values |= {
            "parallel.pipelines": choice.pipelines,
            "parallel.stages": choice.stages,
            "parallel.microbatches": choice.microbatches,
        }
        comment += _said(table, choice)
    return settings.with_values(values), comment


def _said(table: Sequence[Shape], choice: Shape) -> list[str]:
    """A line for each shape. Times are per micro-batch, as multiples of the shortest one without deaths."""
    unit = min((shape.period for shape in table if shape.period), default=1.0)
    lines = ["Step times of the possible shapes, by recycle plan (time of a micro-batch; 1.00 is the shortest):"]
    for shape in table:
        if shape.period is None:
            said = f"does not fit: the fullest worker needs {format_size(shape.fullest)}"
        else:
            after = f"{shape.hit / unit:.2f}" if shape.hit else "a restart from a checkpoint"
            said = f"{shape.period / unit:.2f}, after a death {after}; fullest worker {format_size(shape.fullest)}"
        lines.append(f"  parallel={shape.text:<6} {said}{'  <- chosen' if shape is choice else ''}")
    if not choice.fits:
        lines.append("None fits: recycle plan --memory SIZE with this file names settings that help.")
    return lines


if __name__ == "__main__":
    sys.exit(main())
