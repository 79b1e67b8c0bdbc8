"""Compares the held-out loss of two islands and of one job at equal numbers of tokens, on real text with real compute.

    python bench/islands_loss.py [--steps 600] [--outer H:LR:MOMENTUM] ... [--pictures docs/pictures] [SETTING ...]

All jobs are 2 x 2 and train `model=small` on the sources of Python's standard library. The single job has eight
micro-batches in a step. Each of two islands has four, so the two together read the same number of tokens in a step. For
each `--outer`, two islands train at the same time and do a round with this outer step every H steps. They wait for
each round.

The losses are those of checkpoints, on the same held-out samples. An island's checkpoint contains the common weights,
theta, after a number of rounds. Their loss is shown at the step of the last of these rounds. After each round, theta
must have the same sha256 on both islands; otherwise the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import matplotlib
import torch
from matplotlib.figure import Figure

from recycle_pp.data.batches import Batches
from recycle_pp.islands.__main__ import state
from recycle_pp.state import checkpoint
from recycle_pp.storage.store import Store
from recycle_pp.telemetry.checkpoint_folders import finished
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.testing import reference_trainer
from recycle_pp.testing.local_cluster import Zygote

OUT = Path(__file__).parent / "out" / "islands_loss"
COMMON = [
    "parallel=2x2", "model=small", "numerics.reproducible=true", "run.validate_every=0", "run.standby=off",
    "schedule.profile_steps=0", "checkpoint.keep=1000",
]  # fmt: skip
NAMES = ("oregon", "frankfurt")
SECONDS = 7200.0  # time limit of a job
HELD_OUT = 64  # micro-batches
Curve = dict[int, float]  # step -> loss


class Outer(NamedTuple):
    """Steps between two rounds, and learning rate and momentum of the outer step."""

    steps: int
    lr: float
    momentum: float

    @classmethod
    def parse(cls, text: str) -> Outer:
        steps, lr, momentum = text.split(":")
        return cls(int(steps), float(lr), float(momentum))

    def __str__(self) -> str:
        return f"H={self.steps}, lr {self.lr:g}, momentum {self.momentum:g}"


OUTER = [Outer(50, 0.7, 0.9), Outer(50, 1.0, 0.0), Outer(10, 0.7, 0.9), Outer(10, 1.0, 0.0)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--outer", type=Outer.parse, action="append", metavar="H:LR:MOMENTUM")
    parser.add_argument("--every", type=int, default=50, help="steps between two checkpoints")
    parser.add_argument("--pictures", type=Path, default=OUT)
    parser.add_argument("overrides", nargs="*", default=[])
    given = parser.parse_args()
    shutil.rmtree(OUT, ignore_errors=True)
    common = [*COMMON, f"run.steps={given.steps}", f"checkpoint.every={given.every}", *given.overrides]
    curves, different = {}, 0
    with Zygote() as zygote:
        train(zygote, {"one": [*common, "parallel.microbatches=4"]})
        curves["one job"] = curve(RunFolder(OUT / "one"), given.every)
        for number, outer in enumerate(given.outer or OUTER):
            store = OUT / f"store{number}"
            train(zygote, {f"{name}{number}": island(common, store, name, outer) for name in NAMES})
            curves[f"two islands, {outer}"] = curve(RunFolder(OUT / f"{NAMES[0]}{number}"), outer.steps)
            thetas = [each["theta_sha256"] for each in state(Store(str(store)), given.steps)["rounds"]]
            equal = sum(len(of) == 2 and len({*of.values()}) == 1 for of in thetas)
            different += len(thetas) - equal
            print(f"{outer}: theta is equal on both islands after {equal} of {len(thetas)} rounds", flush=True)
    (OUT / "islands_loss.json").write_text(json.dumps(curves))
    table(curves)
    picture(curves, given.pictures / "islands.svg")
    return 1 if different else 0


def island(common: list[str], store: Path, name: str, outer: Outer) -> list[str]:
    words = [f"islands.store={store}", f"islands.name={name}", "islands.parts=2", "islands.patience=1000"]
    words += [f"islands.steps={outer.steps}", f"islands.max_local={outer.steps}", "parallel.microbatches=2"]
    return [*common, *words, f"islands.lr={outer.lr}", f"islands.momentum={outer.momentum}"]


def train(zygote: Zygote, jobs: dict[str, list[str]]) -> None:
    """Runs jobs side by side to their ends. The first failure ends the script."""
    with ExitStack() as stack:
        running = [stack.enter_context(zygote.run([*words, f"run.dir={OUT / name}"])) for name, words in jobs.items()]
        for job in running:
            if code := job.wait(SECONDS):
                raise SystemExit(f"exit code {code}\n{job.output[-3000:]}")


def curve(run: RunFolder, every: int) -> Curve:
    """Loss by step. For a checkpoint with theta, the step is that of theta's round. every: steps of a round."""
    settings = run.read_settings()
    batches, model = Batches(settings), reference_trainer.whole(settings)
    losses = {}
    for step, path in finished(run.checkpoints).items():
        position = checkpoint.position_in(path)
        vector = "model." if position is None else "theta."
        held = {name: tensor for name, tensor in checkpoint.load(path).items() if name.startswith(vector)}
        model.load_state_dict({name.removeprefix(vector): tensor for name, tensor in held.items()})
        with torch.no_grad():
            of = [model(batch.inputs, batch.labels) for batch in map(batches.validation, range(HELD_OUT))]
        losses[step if position is None else position.applied * every] = float(torch.stack(of).mean())
    return losses


def table(curves: dict[str, Curve]) -> None:
    for name, losses in curves.items():
        print(f"{name}: " + "  ".join(f"{step}: {loss:.3f}" for step, loss in losses.items()))


def picture(curves: dict[str, Curve], path: Path) -> None:
    with matplotlib.rc_context({"font.size": 8, "svg.fonttype": "none", "svg.hashsalt": "recycle_pp"}):
        figure = Figure(figsize=(7.2, 2.8), layout="constrained")
        axes = figure.add_subplot()
        for name, losses in curves.items():
            axes.plot([*losses], [*losses.values()], label=name, marker=".", linewidth=1)
        axes.set_xlabel("step")
        axes.set_ylabel("held-out loss")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
