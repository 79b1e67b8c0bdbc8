"""Runs the command run.evaluate on the model of a checkpoint.

    python -m recycle_pp.evaluate runs/mine                      # the newest checkpoint
    python -m recycle_pp.evaluate runs/mine --step 2000

Exports the checkpoint (recycle_pp.export) and runs run.evaluate in a shell, with the model's folder as $1. The output
goes to evaluations/step-002000.log in the run folder. A checkpoint that has such a file is not evaluated again. The
exported folder is removed afterwards.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import BinaryIO, NoReturn

from recycle_pp.command import parser_of
from recycle_pp.linux.processes import die_with_parent
from recycle_pp.state.stored import steps_in
from recycle_pp.telemetry.checkpoint_folders import name
from recycle_pp.telemetry.run_folder import RunFolder


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0; 1 if the export or the command failed; 2 after one sentence about a mistake."""
    parser = parser_of("evaluate", __doc__)
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the folder of a run, run.dir")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint step-N (default: the newest)")
    parser.add_argument("--beside", action="store_true", help=argparse.SUPPRESS)  # this process ends with its parent
    arguments = parser.parse_args(argv)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    if arguments.beside:
        die_with_parent(os.getppid(), signal.SIGTERM)
    run = RunFolder(arguments.run_dir)
    try:
        settings = run.read_settings()
        command, steps = settings.run.evaluate, steps_in(run.checkpoints, settings.checkpoint.store, arguments.step)
        step = max(steps, default=None) if arguments.step is None else arguments.step
        if command is None:
            raise ValueError(f"run.evaluate is not set in {run.path}")
        if step is None or not (step in steps or _log(run, step).exists()):
            known = f"--step must be one of {', '.join(map(str, steps))}, the checkpoints in {run.path}, not {step}"
            raise ValueError(known if steps else f"{run.path} has no checkpoint")
        return _evaluate(run, step, command)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _log(run: RunFolder, step: int) -> Path:
    return run.path / "evaluations" / f"{name(step)}.log"


def _evaluate(run: RunFolder, step: int, command: str) -> int:
    log = _log(run, step)
    if log.exists():
        return 0
    log.parent.mkdir(exist_ok=True)
    partial = log.with_suffix(".log.partial")
    with tempfile.TemporaryDirectory(dir=log.parent) as place, partial.open("wb") as output:
        model = Path(place) / name(step)
        export = [sys.executable, "-m", "recycle_pp.export", str(run.path), str(model), "--step", str(step), "--merge"]
        environment = {**os.environ, "RECYCLE_RUN_DIR": str(run.path)}
        environment.pop("RECYCLE_TOKEN", None)  # the job's secret
        for words in (export, ["/bin/sh", "-c", command, "sh", str(model)]):
            if code := _run(words, output, environment):
                print(f"{name(step)} could not be evaluated (exit code {code}); see {partial}", file=sys.stderr)
                return 1
    partial.rename(log)
    return 0


def _run(words: list[str], output: BinaryIO, environment: dict[str, str]) -> int:
    """Runs a command, and returns its exit code. Kills all its processes, even if a signal ends this process."""
    process = subprocess.Popen(words, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        return process.wait()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
