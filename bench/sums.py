"""Errors of a step's summed gradients, as relative L2 errors against float64, for the median and the worst tensor.

    python bench/sums.py [--addends 4 16 64] [--steps 20] [model=small ...]

The addends are the real gradients of one step of a small Transformer, after some training. The gradients of the
previous step give the exponents. `rounded to bf16` rounds each addend to bf16 before the sum.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from results import save
from torch import Tensor

from recycle_pp.config.compose import compose
from recycle_pp.config.settings import Settings
from recycle_pp.data.batches import Batches
from recycle_pp.model.stage import Stage
from recycle_pp.numerics import fixed_point as fixed
from recycle_pp.numerics import torch_operations as ops
from recycle_pp.numerics.gradients import Gradients, Reduced
from recycle_pp.numerics.optimizer import StageOptimizer

CPU = torch.device("cpu")
Addends = list[list[Tensor]]  # the gradients by micro-batch, then by tensor
Sum = Callable[[Stage, Addends, Addends], list[Tensor]]  # (stage, addends of the previous step, addends of this step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--addends", type=int, nargs="+", default=[4, 16, 64], help="micro-batches of a step")
    parser.add_argument("--steps", type=int, default=20, help="training steps before the measurement")
    parser.add_argument("overrides", nargs="*", default=[])
    arguments = parser.parse_args()
    rows = []
    print(f"{'addends':>8}  {'sums':32}{'median':>10}{'worst':>10}{'bits kept':>11}")
    for count in arguments.addends:
        shape = ["parallel=1x1", f"parallel.microbatches={count}", "parallel.microbatch_size=1"]
        stage, before, now = trained(compose([*shape, *arguments.overrides]), arguments.steps)
        exact = [sum(parts[1:], parts[0]) for parts in zip(*[[g.double() for g in one] for one in now], strict=True)]
        for name, total in SUMS.items():
            errors = [relative(a, b) for a, b in zip(total(stage, before, now), exact, strict=True)]
            bits = {"int64": fixed.INT64, "int32": fixed.INT32}.get(name[:5])
            rows.append({"addends": count, "sums": name, "median": statistics.median(errors), "worst": max(errors)})
            kept = str(bits.kept(count)) if bits else "-"
            print("{addends:8}  {sums:32}{median:10.1e}{worst:10.1e}".format(**rows[-1]) + f"{kept:>11}")
    save("sums.json", rows)


def trained(settings: Settings, steps: int) -> tuple[Stage, Addends, Addends]:
    """A stage after `steps` training steps, and the addends of its last two steps."""
    stage, batches = Stage(settings, 0, CPU), Batches(settings)
    optimizer = StageOptimizer(settings, stage)
    before: Addends = []
    now: Addends = []
    for step in range(steps):
        total, of_step = stage.layout.vector(CPU), []
        for g in range(stage.microbatches):
            stage.forward(step, g, batches.batch(step, g))
            stage.backward(g)
            (flat, _) = stage.gradients.payload()
            of_step.append(stage.layout.views(flat))
            total += flat
            stage.gradients.clear()
        before, now = now, of_step
        stage.gradients.close(0, 0.0)
        reduced = stage.gradients.reduced([total, torch.zeros(4, stage.microbatches, dtype=torch.float64)])
        optimizer.step(reduced, step, 0.5)
        stage.gradients.clear()
    return stage, before, now


def fixed_point(form: fixed.Format) -> Sum:
    def total(stage: Stage, before: Addends, now: Addends) -> list[Tensor]:
        gradients = Gradients(stage.layout, stage.microbatches, CPU, reproducible=True, ops=ops, form=form)
        reduced: Reduced | None = None
        for addends in (before, now):
            for attempt in range(4):
                if attempt:
                    gradients.begin_again(attempt, reduced)
                for g, one in enumerate(addends):
                    for index, grad in enumerate(one):
                        gradients.add(index, grad)
                    gradients.close(g, 0.0)
                reduced = gradients.reduced(gradients.payload())
                if reduced.fits:
                    break
            assert reduced is not None and reduced.fits
            gradients.follow(reduced)
            gradients.clear()
        assert reduced is not None
        return stage.layout.views(reduced.flat)

    return total


def in_order(dtype: torch.dtype, addend: torch.dtype) -> Sum:
    def total(stage: Stage, before: Addends, now: Addends) -> list[Tensor]:
        sums: list[Tensor] = []
        for one in now:
            rounded = [grad.to(addend).to(dtype) for grad in one]
            sums = [a + b for a, b in zip(sums, rounded, strict=True)] if sums else rounded
        return sums

    return total


SUMS: dict[str, Sum] = {
    "float32, in order": in_order(torch.float32, torch.float32),
    "bf16, in order": in_order(torch.bfloat16, torch.bfloat16),
    "rounded to bf16, summed in float32": in_order(torch.float32, torch.bfloat16),
    "int64, exponent of a unit": fixed_point(fixed.INT64),
    "int32, exponent of a row": fixed_point(fixed.INT32),
}


def relative(a: Tensor, exact: Tensor) -> float:
    return ((a.double() - exact).norm() / exact.norm()).item()


if __name__ == "__main__":
    main()
