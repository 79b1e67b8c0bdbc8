"""The tables of `plan --memory 80GB`: whether each stage fits into a worker's memory, without deaths and after deaths.

    python -m recycle_pp.plan --memory 80GB --model llama8b --pipelines 8 --stages 4 --microbatches 32
    python -m recycle_pp.plan --memory 80GB --model meta-llama/Llama-3-8B parallel=2x4 numerics=bf16
    python -m recycle_pp.plan --memory 16GB model.layers=12 run.device=cpu --json
    python -m recycle_pp.plan --memory 80GB --model meta-llama/Llama-3-8B parallel=2x4 model.lora.rank=16

All other arguments are settings of the trainer. If the job does not fit even without deaths, a sentence states which
settings would help, and the exit code is 2. The bytes are those of tensors and of NCCL's communicators. A GPU's context
and libraries need additional memory.
"""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from recycle_pp.config.compose import compose
from recycle_pp.config.run_file import is_run_file
from recycle_pp.config.settings import Settings
from recycle_pp.config.sizes import format_size, parse_size

from .first_layout import first_layout
from .outlook import Outcome, Row, outlook
from .problem_source import compile_planner
from .remedies import refusal

PARTS = (
    "weights",
    "optimizer state",
    "sums",
    "replay log",
    "communicators",
    "activations",
    "reduced gradient",
    "reduction",
    "update",
    "checkpoint",
)


def capacity_of(text: str | None) -> float | None:
    """Bytes, if `--memory` gives a size (80GB); None if it gives a limit in micro-batches (4, 1f1b+2)."""
    if text is None or text.isdigit() or "/" in text or text.startswith("1f1b"):
        return None
    try:
        return parse_size(text)
    except ValueError:
        return None


def show(arguments: argparse.Namespace, capacity: float, console: Console) -> int:
    """Prints the tables, or JSON. Returns the exit code.

    If the job does not fit even without deaths, returns 2 after printing JSON, and raises ValueError with one sentence
    instead of printing tables.
    """
    settings = settings_of(arguments)
    if settings.model.split == "auto":
        with suppress(ValueError):  # if no layout fits, the table says so
            chosen = first_layout(settings.with_values({"parallel.memory": arguments.memory}))
            settings = settings.with_values({"model.auto_split": chosen})
    compile_planner()
    device = "cpu" if settings.run.device == "cpu" else "cuda"
    outcomes = outlook(settings, capacity, device)
    sentences = [_sentence(settings, outcome, outcomes[0], capacity, device) for outcome in outcomes]
    if arguments.json:
        print(json.dumps(_as_json(settings, capacity, outcomes, sentences), indent=1))
    elif not outcomes[0].fits:
        raise ValueError(f"--memory: {sentences[0]}")
    else:
        for outcome, sentence in zip(outcomes, sentences, strict=True):
            console.print(f"{outcome.name}: {sentence}", highlight=False, soft_wrap=True)
            if any(row.peers for row in outcome.rows):
                console.print(_grid(outcome))
    return 0 if outcomes[0].fits else 2


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The settings from `--model`, from --pipelines, --stages and --microbatches, and from settings of the trainer."""
    if wrong := next((word for word in arguments.source if "=" not in word and not is_run_file(word)), None):
        raise ValueError(f"--memory: give a model and trainer settings (parallel=2x4) with it, not {wrong}")
    words = [f"parallel.{key}={n}" for key in ("pipelines", "stages", "microbatches") if (n := getattr(arguments, key))]
    model = arguments.model
    if model is not None and (Path(model) / "config.json").is_file():
        words += ["model=llama", f"model.path={json.dumps(model)}", "model.init=random"]
    elif model is not None:
        words.append(f"model={model}")
    return compose([*words, *arguments.source])


def _sentence(settings: Settings, outcome: Outcome, whole: Outcome, capacity: float, device: str) -> str:
    if not any(row.peers for row in outcome.rows):
        return "the stage is lost, and the job restarts from its newest checkpoint"
    if not outcome.fits:
        return refusal(settings, outcome, capacity, device, format_size)
    fullest = max(outcome.rows, key=lambda row: row.bytes)
    uses = f"uses {format_size(fullest.bytes)} of {format_size(capacity)}"
    said = f"fits; the fullest worker, of stage {fullest.stage}, {uses}"
    if outcome.dead and outcome.period and whole.period:
        said += f"; a step takes {100 * (outcome.period / whole.period - 1):+.0f} % if stage {outcome.hit} is hit"
    if outcome.dead >= (settings.parallel.copies or outcome.dead + 1):
        said += "; if both held the same units of the optimizer state, the job restarts from its newest checkpoint"
    return said


def _grid(outcome: Outcome) -> Table:
    grid = Table(box=None, padding=(0, 2, 0, 0))
    used = [name for name in PARTS if any(name in row.parts for row in outcome.rows)]
    for name in ("stage", "layers", "parameters", "live", "in flight", "backward", *used, "in all", "fits"):
        grid.add_column(name, justify="left" if name in ("backward", "fits") else "right")
    for row in outcome.rows:
        sizes = [format_size(row.parts[name]) if row.parts.get(name) else "-" for name in used]
        grid.add_row(
            *(str(row.stage), str(row.layers), format_size(row.parameters)[:-1].strip(), str(row.peers)),
            f"{row.in_flight:g} of {row.wanted:g}",
            _backward(row),
            *sizes,
            format_size(row.bytes),
            "yes" if row.fits else "no",
        )
    return grid


def _backward(row: Row) -> str:
    return ("whole" if row.whole else "split") + (", recomputed" if row.recompute else "")


def _as_json(settings: Settings, capacity: float, outcomes: list[Outcome], sentences: list[str]) -> dict[str, Any]:
    of = [
        asdict(outcome) | {"name": outcome.name, "fits": outcome.fits, "sentence": sentence}
        for outcome, sentence in zip(outcomes, sentences, strict=True)
    ]
    for outcome, found in zip(outcomes, of, strict=True):
        found["rows"] = [asdict(row) | {"fits": row.fits, "bytes": row.bytes} for row in outcome.rows]
    return {"capacity": capacity, "parallel": asdict(settings.parallel), "outcomes": of}
