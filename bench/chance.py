"""Tests whether the final loss of bf16, and of fp32 with bf16 moments, is above that of fp32 only by chance.

    python bench/chance.py [--seeds 5] [--steps 300] [model.layers=4 ...]

Training is chaotic. Initial weights that differ by bf16's rounding (2^-9 of each) give a different loss a few hundred
steps later. The distance between such runs of fp32 (`nudged`) is the scale for judging a precision.

All runs are in one process, with the reference trainer of the tests (`testing/reference_trainer.py`). It runs the same
operations as a job and gets the same bits. val_loss is the loss on held-out text at the end. For every seed the bench
prints fp32's val_loss and how far above it the other runs end, then the mean and the standard error of these distances.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from results import save

from recycle_pp.config.compose import compose
from recycle_pp.config.settings import Settings
from recycle_pp.data.batches import Batches
from recycle_pp.testing.reference_trainer import masters_of, train, whole

SHAPE = [
    "model=small", "model.layers=4", "parallel=1x1", "parallel.microbatches=2", "parallel.microbatch_size=8",
    "numerics.reproducible=false",
]  # fmt: skip
KINDS = {
    "fp32": (),
    "nudged": (),
    "bf16": ("numerics.precision=bf16",),
    "bf16-autocast": ("numerics.precision=bf16-autocast",),
    "bf16 moments": ("optimizer.moments=bf16",),
}
VALIDATIONS = 16  # micro-batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("overrides", nargs="*", default=[])
    arguments = parser.parse_args()
    print(f"{'seed':6}" + "".join(f"{kind:>15}" for kind in KINDS))
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for seed in range(arguments.seeds):
        for kind in KINDS:
            more = [f"run.seed={seed}", f"run.steps={arguments.steps}", *KINDS[kind]]
            found[kind].append(trained(compose([*SHAPE, *arguments.overrides, *more]), kind == "nudged"))
        first = found["fp32"][-1]
        print(
            f"{seed:<6}{first:15.4f}" + "".join(f"{found[kind][-1] - first:+15.4f}" for kind in [*KINDS][1:]),
            flush=True,
        )
    apart = {k: [a - b for a, b in zip(found[k], found["fp32"], strict=True)] for k in [*KINDS][1:]}
    print(
        f"{'mean':6}{statistics.fmean(found['fp32']):15.4f}", *(f"{statistics.fmean(x):+14.4f}" for x in apart.values())
    )
    if arguments.seeds > 1:
        errors = [statistics.stdev(x) / len(x) ** 0.5 for x in apart.values()]
        print(f"{'error':6}{'':15}", *(f"{error:14.4f}" for error in errors))
    save("chance.json", {"steps": arguments.steps, "val_loss": found})


def trained(settings: Settings, nudged: bool) -> float:
    """Trains. Returns the final val_loss. nudged: whether the initial weights are slightly changed."""
    model, batches = whole(settings), Batches(settings)
    parameters = list(model.parameters())
    if nudged:
        random = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(1 + 2**-9 * torch.randn(parameter.shape, generator=random))
    for _ in train(settings, settings.run.steps, model, batches, masters_of(settings, parameters)):
        pass
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=settings.numerics.precision == "bf16-autocast")
    with torch.no_grad(), autocast:
        return statistics.fmean(
            model(of.inputs, of.labels).item() for of in map(batches.validation, range(VALIDATIONS))
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
