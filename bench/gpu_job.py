"""A whole job on one card, started by torchrun, with kills, or a plain training loop for comparison. For `gpu.py`.

    python bench/gpu_job.py --steps 300 --kills 20              # 2x2 workers share the GPU over TCP
    python bench/gpu_job.py --backend nccl --shape 2x1 --steps 20 --fail-at 5:1.0@vote
    python bench/gpu_job.py --plain --steps 300                 # an ordinary training loop in one process

Trains gpt124m in bf16 on Python's own sources, with G = 8 micro-batches of one sample in every shape. The last line is
JSON: sha256 of the final weights, mean loss of the last tenth of the steps, deaths, seconds per step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from recycle_pp.chaos import Live
from recycle_pp.telemetry.run_folder import RunFolder

MICROBATCHES = 8  # per step
RESTS = 1.0  # longest time between two kills, seconds, while any worker may be killed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--kills", type=int, default=0, help="number of random kills, never of the last worker of a stage"
    )
    parser.add_argument("--fail-at", help="STEP:D.S@MOMENT")
    parser.add_argument("--shape", default="2x2", help="DxP")
    parser.add_argument("--backend", default="tcp")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    result = plain(options) if options.plain else job(options)
    print(json.dumps(result))
    return result.get("code", 0)


def settings_of(options: argparse.Namespace) -> list[str]:
    pipelines = int(options.shape.partition("x")[0])
    sizes = ["model=tiny"] if options.cpu else ["model=gpt124m"]
    return [
        *sizes,
        f"parallel={options.shape}",
        f"parallel.microbatches={MICROBATCHES // pipelines}",
        "parallel.microbatch_size=1",
        f"run.steps={options.steps}",
        f"run.device={'cpu' if options.cpu else 'cuda'}",
        "run.validate_every=0",
        "run.respawns=1000",
        "checkpoint.every=10",
        "numerics=bf16",
        "numerics.reproducible=true",
        "numerics.sums=int32",  # halves the bytes between peers, which go through the host
        "optimizer.warmup=10",
    ]


def job(options: argparse.Namespace) -> dict[str, Any]:
    pipelines, stages = map(int, options.shape.split("x"))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={pipelines * stages}"]
    overrides = [*settings_of(options), f"parallel.backend={options.backend}"]
    if options.fail_at:
        step, _, rest = options.fail_at.partition(":")
        overrides += [f"+fail_at={options.fail_at}", f"+rejoin_at={int(step) + 4}:{rest.partition('@')[0]}"]
    folder = Path(tempfile.mkdtemp(prefix="recycle-gpu-"))
    run = RunFolder(folder / "run")
    command = [*launcher, "-m", "recycle_pp.train", *overrides, f"run.dir={run.path}"]
    process = subprocess.Popen(command)
    try:
        kill_at_random(run, options.kills, options.steps, process)
        code = process.wait()
    finally:
        process.kill()
    events, metrics = run.lines(run.events), run.lines(run.metrics)
    summary = json.loads(run.summary.read_text()) if run.summary.exists() else {}
    shutil.rmtree(folder / "run" / "checkpoints", ignore_errors=True)
    if code == 0:
        shutil.rmtree(folder)
    else:
        print(f"the run is kept in {folder}")
    late = [line["loss"] for line in metrics[-max(1, options.steps // 10) :]]
    return {
        "code": code,
        "sha256": summary.get("weights_sha256"),
        "loss": statistics.mean(late) if late else float("nan"),
        "deaths": sum(event["event"] == "death_detected" for event in events),
        "step_seconds": statistics.median(line["step_seconds"] for line in metrics) if metrics else float("nan"),
        "stall_ms": 1e3 * statistics.median([e["stall_seconds"] for e in events if e["event"] == "resumed"] or [0.0]),
    }


def kill_at_random(run: RunFolder, kills: int, steps: int, process: subprocess.Popen[Any]) -> None:
    """Sends SIGKILL at random instants to workers, but never to the last one of a stage, until the last tenth of the
    steps."""
    chance, live, last = random.Random(7), Live(run), time.monotonic()
    while kills and process.poll() is None:
        time.sleep(0.02)
        if not run.events.exists():
            continue
        live.update()
        if live.steps() > 0.9 * steps:
            return
        victims = [worker for worker in live.victims(cruel=False) if worker in live.members]
        if live.steps() >= 2 and victims and time.monotonic() - last > RESTS * chance.uniform(0.2, 1.0):
            victim, last = chance.choice(victims), time.monotonic()
            with suppress(ProcessLookupError):
                os.kill(live.pids[victim], signal.SIGKILL)
            live.remove(victim)
            kills -= 1


def plain(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from recycle_pp.config.compose import compose
    from recycle_pp.testing.reference_trainer import train, whole

    settings = compose(settings_of(options))
    settings = settings.with_values({"numerics.reproducible": False, "model.kernels": "reference"})
    device = torch.device("cpu" if options.cpu else "cuda")
    losses = [loss for loss, _ in train(settings, options.steps, whole(settings, device))]
    return {"loss": statistics.mean(losses[-max(1, options.steps // 10) :])}


if __name__ == "__main__":
    sys.exit(main())
