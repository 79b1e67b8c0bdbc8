"""CPU seconds of a training step without failures: recycle_pp, torch's Schedule1F1B, and one process.

    python bench/faultfree.py [--steps 8] [--rounds 2] [model=bench17m ...]

Compares two pipelines of four stages (8 single-threaded processes) with one process, on the same model, samples,
optimizer and clipping. With fewer cores than workers, wall time does not show bubbles. The figure is therefore the
CPU time (user + system) of all processes, as the median over the steps. The contenders alternate, so that other load
affects all alike. Their losses must agree, which shows that they do the same work.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import socket
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from results import save
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

from recycle_pp.config.compose import compose
from recycle_pp.config.settings import Settings
from recycle_pp.data.batches import Batches
from recycle_pp.linux.processes import die_with_parent
from recycle_pp.model.split import layers_of
from recycle_pp.model.transformer import Build, Linear, Transformer, depth
from recycle_pp.numerics.hyperparameters import learning_rate
from recycle_pp.testing import reference_trainer as plain
from recycle_pp.testing.local_cluster import Zygote

SHAPE = ["parallel=2x4", "run.validate_every=0", "optimizer.clip=1.0", "parallel.microbatch_size=2"]
WARM_UP = 4  # first steps, which are not measured, because recycle_pp profiles its ops in the first three
TOLERANCE = 1e-4  # relative, between the losses of the contenders
PATIENCE = 600  # seconds for one run


class Step(NamedTuple):
    """CPU seconds and a share of the mean loss, either of one process or summed over processes."""

    seconds: float
    loss: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help=f"steps per run; the first {WARM_UP} are not measured")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("overrides", nargs="*", default=["model=bench17m"])
    arguments = parser.parse_args()
    if arguments.steps <= WARM_UP:
        parser.error(f"--steps must be more than {WARM_UP}, because the first {WARM_UP} are warm-up and not measured")
    overrides = [*SHAPE, *arguments.overrides, f"run.steps={arguments.steps}"]
    settings = compose(overrides)
    samples: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}
    contenders: dict[str, Callable[[], list[Step]]] = {
        "one process": lambda: forked(_alone, 1, settings),
        "torch Schedule1F1B": lambda: forked(_torch, settings.parallel.pipelines * settings.parallel.stages, settings),
        "recycle_pp": lambda: ours(overrides),
    }
    for _ in range(arguments.rounds):
        for name, run in contenders.items():
            steps = run()
            losses[name] = [step.loss for step in steps]
            samples.setdefault(name, []).extend(step.seconds for step in steps[WARM_UP:])
    report(settings, samples, losses)


def report(settings: Settings, samples: dict[str, list[float]], losses: dict[str, list[float]]) -> None:
    medians = {name: statistics.median(values) for name, values in samples.items()}
    p = settings.parallel
    tokens = p.pipelines * p.microbatches * p.microbatch_size * settings.model.sequence
    print(f"{tokens} tokens a step; CPU-seconds a step over {len(samples['recycle_pp'])} steps")
    print(f"{'':>20}  {'median':>8}  {'least':>8}  of one process  last loss")
    for name, value in medians.items():
        share = value / medians["one process"]
        print(f"{name:>20}  {value:6.3f} s  {min(samples[name]):6.3f} s  {share:14.3f}  {losses[name][-1]:.7f}")
    ratio = medians["recycle_pp"] / medians["torch Schedule1F1B"]
    print(f"recycle_pp takes {ratio:.3f} of torch's Schedule1F1B")
    worst = max(
        abs(loss - reference) / abs(reference)
        for of in losses.values()
        for loss, reference in zip(of, losses["one process"], strict=True)
    )
    print(f"losses agree to {worst:.1e} (relative, all steps)")
    content = {"tokens": tokens, "median": medians, "samples": samples, "losses": losses, "torch": torch.__version__}
    save("faultfree.json", content)
    if worst > TOLERANCE:
        raise SystemExit("the contenders do not compute the same")


def ours(overrides: list[str]) -> list[Step]:
    """The steps of a job. CPU seconds are those of the coordinator and of the workers, which report them in votes."""
    with Zygote() as zygote, zygote.run(overrides) as job:
        if job.wait(PATIENCE):
            raise SystemExit(job.output)
        return [Step(line["cpu_seconds"], line["loss"]) for line in job.run.lines(job.run.metrics)]


def forked(target: Callable[[int, Settings, int], list[Step]], count: int, settings: Settings) -> list[Step]:
    """Runs `target(rank, settings, port)` in `count` processes, and returns the steps as sums over them. No process
    outlives this call."""
    context = multiprocessing.get_context("fork")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        results = [Path(folder) / str(rank) for rank in range(count)]
        processes = [
            context.Process(target=_child, args=(target, rank, settings, port, results[rank], os.getpid()))
            for rank in range(count)
        ]
        try:
            for process in processes:
                process.start()
            deadline = time.monotonic() + PATIENCE
            while any(process.exitcode is None for process in processes):
                if time.monotonic() > deadline or any(process.exitcode for process in processes):
                    raise SystemExit(f"{target.__name__[1:]} failed, or took more than {PATIENCE} s")
                time.sleep(0.05)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        by_rank = [json.loads(result.read_text()) for result in results]
    return [Step(*map(sum, zip(*step, strict=True))) for step in zip(*by_rank, strict=True)]


def _child(target: Any, rank: int, settings: Settings, port: int, result: Path, parent: int) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    try:
        result.write_text(json.dumps(target(rank, settings, port)))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _alone(rank: int, settings: Settings, port: int) -> list[Step]:
    steps, begun = [], time.process_time()
    for loss, _ in plain.train(settings, settings.run.steps):
        now = time.process_time()
        steps.append(Step(now - begun, loss))
        begun = now
    return steps


def _torch(rank: int, settings: Settings, port: int) -> list[Step]:
    """1F1B in each pipeline, gradients summed over the pipelines in place, clipping by the norm of the whole model."""
    parallel, device = settings.parallel, torch.device("cpu")
    D, P, M = parallel.pipelines, parallel.stages, parallel.microbatches
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=D * P)
    pipeline, index = divmod(rank, P)
    lines = [dist.new_group([d * P + s for s in range(P)]) for d in range(D)]
    peers = [dist.new_group([d * P + s for d in range(D)]) for s in range(P)]
    first, last = index == 0, index == P - 1
    part = Part(settings, index)
    tokens = torch.zeros(parallel.microbatch_size, settings.model.sequence, dtype=torch.int64)
    hidden = torch.empty(*tokens.shape, settings.model.width, requires_grad=True)  # without it torch sends no gradient
    logits = torch.empty(*tokens.shape, settings.model.vocabulary, requires_grad=True)
    stage = PipelineStage(
        part,
        index,
        P,
        device,
        input_args=(tokens if first else hidden,),
        output_args=(logits if last else hidden,),
        group=lines[pipeline],
    )

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten()) / (D * M)

    schedule = Schedule1F1B(stage, M, loss_fn=loss_of, scale_grads=False)
    optimizer = plain.adamw(settings, list(part.model.parameters()))
    parameters = list(part.parameters())
    batches = Batches(settings)
    steps = []
    for step in range(settings.run.steps):
        begun = time.process_time()
        losses: list[torch.Tensor] = []
        data = [batches.batch(step, pipeline * M + i) for i in range(M)] if first or last else []
        if first:
            schedule.step(torch.cat([batch.inputs for batch in data]))
        elif last:
            schedule.step(target=torch.cat([batch.labels for batch in data]), losses=losses)
        else:
            schedule.step()
        gradients = [plain.gradient(parameter) for parameter in parameters]
        for gradient in gradients:
            dist.all_reduce(gradient, group=peers[index])
        square = torch.stack(torch._foreach_norm(gradients)).square().sum()
        dist.all_reduce(square, group=lines[pipeline])
        if settings.optimizer.clip is not None:
            scale = settings.optimizer.clip / (square.sqrt().item() + 1e-6)
            if scale < 1:
                torch._foreach_mul_(gradients, scale)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings.optimizer, step, settings.run.steps)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(Step(time.process_time() - begun, sum(loss.item() for loss in losses)))
    dist.barrier()
    dist.destroy_process_group()
    return steps


class Part(torch.nn.Module):
    """The layers of one stage with ordinary autograd. The last stage returns logits (b, T, V)."""

    def __init__(self, settings: Settings, stage: int):
        super().__init__()
        build = Build(settings.model, settings.run.seed, torch.device("cpu"))
        self.model = Transformer(
            build, layers_of(depth(settings.model), settings.parallel.stages, settings.model.layout)[stage]
        )

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        model, shape = self.model, source.shape[:2]
        x = source.flatten(0, 1) if model.embedding is None else model.embedding(source.flatten())
        branch = None
        for layer in model.layers.values():
            x, branch = layer(x, branch, model.cos, model.sin, None, None)
        if model.head is not None and model.norm is not None:
            x = Linear.forward(model.head, model.norm(x, branch)[0])
        elif branch is not None:
            x = x + branch
        return x.view(*shape, -1)


if __name__ == "__main__":
    main()
