"""Compares bf16 with fp32 in loss and cost: real jobs of two stages train a small GPT on Python's own sources.

    python bench/precision.py [--steps 300] [--picture docs/pictures/bf16.svg] [model.layers=4 ...]

The four jobs differ only in `numerics`. They have the same initial values and the same samples in the same order.

    loss        mean of the last 50 steps
    val_loss    loss on held-out text at the end
    message     bytes from a stage to the next one, per micro-batch
    log         peak bytes that a worker kept for replay until a commit (metrics.jsonl)
    sums        bytes that a worker contributes to the all-reduce of a step
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from results import save

from recycle_pp.config.compose import compose
from recycle_pp.model.memory import parameters
from recycle_pp.testing.local_cluster import Zygote

JOBS = {
    "fp32": ("numerics=reproducible",),
    "bf16": ("numerics=bf16", "numerics.reproducible=true"),
    "bf16, int32 sums": ("numerics=bf16", "numerics.reproducible=true", "numerics.sums=int32"),
    "bf16-autocast": ("numerics=bf16-autocast", "numerics.reproducible=true"),
}
SHAPE = (
    "parallel.pipelines=1",
    "parallel.stages=2",
    "parallel.microbatches=4",
    "parallel.microbatch_size=4",
    "run.validate_samples=32",
)
COLOURS = {"fp32": "#222222", "bf16": "#0072b2", "bf16, int32 sums": "#d55e00", "bf16-autocast": "#009e73"}
AVERAGED = 10  # number of steps over which the picture averages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--picture", type=Path, help="where the loss curves are drawn (svg, png or pdf)")
    parser.add_argument("overrides", nargs="*", default=[])
    arguments = parser.parse_args()
    print(f"{'':18}{'loss':>9}{'val_loss':>10}{'message':>10}{'log':>10}{'sums':>12}{'again':>7}")
    curves, rows = {}, []
    with Zygote() as zygote:
        for name, numerics in JOBS.items():
            curves[name], row = train(zygote, [*SHAPE, *arguments.overrides, *numerics], arguments.steps)
            rows.append({"numerics": name, **row})
            print(
                "{numerics:18}{loss:9.4f}{val_loss:10.4f}{message:10,}{log:10,}{sums:12,}{again:7}".format(**rows[-1])
            )
    save("precision.json", {"rows": rows, "losses": curves})
    if arguments.picture:
        draw(curves, arguments.picture)


def train(zygote: Zygote, overrides: list[str], steps: int) -> tuple[list[float], dict[str, Any]]:
    """Trains. Returns the loss of every step, and a row of the table."""
    overrides = [*overrides, f"run.steps={steps}", f"run.validate_every={steps}", "checkpoint.minutes=0"]
    with zygote.run(overrides) as job:
        if job.wait(3600):
            raise SystemExit(job.output)
        lines = list(job.run.lines(job.run.metrics))
        again = sum(event["event"] == "repeated" for event in job.run.lines(job.run.events))
        message = json.loads(job.run.profile.read_text())["boundary_bytes"][0]
    settings = compose(overrides)
    layers = int(settings.model.layers or 0)
    held = max(parameters(settings.model, range(layers // 2)), parameters(settings.model, range(layers // 2, layers)))
    losses = [line["loss"] for line in lines]
    return losses, {
        "loss": statistics.fmean(losses[-50:]),
        "val_loss": lines[-1]["val_loss"],
        "message": message,
        "log": max(line["logged_bytes"] for line in lines),
        "sums": held * (4 if settings.numerics.sums == "int32" else 8),
        "again": again,
    }


def draw(curves: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    style: dict[Any, Any] = {"font.size": 8, "svg.fonttype": "none", "svg.hashsalt": "recycle_pp"}
    with matplotlib.rc_context(style):
        figure, (whole, apart) = pyplot.subplots(1, 2, figsize=(7.2, 2.6), layout="constrained")
        base = means(curves["fp32"])
        for name, losses in curves.items():
            smooth = means(losses)
            steps = range(AVERAGED, AVERAGED + len(smooth))
            whole.plot(steps, smooth, color=COLOURS[name], linewidth=1, label=name)
            if name != "fp32":
                apart.plot(steps, [a - b for a, b in zip(smooth, base, strict=True)], color=COLOURS[name], linewidth=1)
        whole.set(xlabel="step", ylabel=f"loss, mean of {AVERAGED} steps")
        whole.legend(frameon=False)
        apart.axhline(0, color=COLOURS["fp32"], linewidth=1)
        apart.set(xlabel="step", ylabel="minus that of fp32")
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def means(losses: list[float]) -> list[float]:
    return [statistics.fmean(losses[k - AVERAGED : k]) for k in range(AVERAGED, len(losses) + 1)]


if __name__ == "__main__":
    main()
