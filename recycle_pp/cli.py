"""The command `recycle`, which runs every other command of the project.

    recycle                                      # the list of commands
    recycle init run.yaml model=gpt124m          # writes a file with every setting; then: recycle train run.yaml
    recycle train parallel=2x2 model=tiny        # starts torchrun for four workers on this machine
    recycle status runs/mine                     # the same as python -m recycle_pp.status runs/mine

`recycle train` validates the settings before it imports torch. If they contain a mistake, it prints one sentence and
exits with code 2. Under a launcher (RANK is set), or for a single worker, it becomes `python -m recycle_pp.train`.
"""

from __future__ import annotations

import difflib
import importlib
import os
import signal
import sys
from collections.abc import Sequence

COMMANDS = {
    "init": "write a commented file with every setting, for this machine",
    "train": "train a model; starts torchrun for the workers of this machine",
    "status": "show whether a run is alive, its speed, its loss and its dead workers",
    "doctor": "explain why a run hangs or died, and what to do next",
    "health": "look at the GPUs of this machine, exercise them, or lift a quarantine",
    "ctl": "stop, drain, checkpoint, profile or change a running job",
    "islands": "list the rounds and the islands in a store",
    "report": "summarize a run: deaths, their causes and their cost",
    "replay": "repeat the decisions of a run's coordinator, and print why each was made",
    "plan": "compute the step time and memory with some workers dead",
    "visualize": "draw a schedule, or a step of a run",
    "simulate": "estimate what weeks on unreliable machines deliver and cost",
    "chaos": "kill, stop and slow down workers of a running job",
    "tokenize": "tokenize text once, into a file for data.path",
    "export": "write a model as a folder that transformers loads",
    "evaluate": "run run.evaluate on the model of a checkpoint",
    "generate": "sample text from a checkpoint",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code of the command, or 2 after printing one sentence about the user's mistake.

    arguments: the command line without the program's name; None: the command line of this process.
    """
    from recycle_pp.command import open_streams, say

    open_streams()
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("--help", "-h", "help"):
        say(_help())
        return 0
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {close[0]}?" if close else f"the commands are: {', '.join(COMMANDS)}"
        print(f"recycle: {name} is not a command; {hint}", file=sys.stderr)
        return 2
    if name == "train" and "RANK" not in os.environ and not {"--help", "-h"} & set(rest):
        return _train(rest)
    return _become(name, rest)


def _help() -> str:
    lines = ["usage: recycle COMMAND ...", "", "commands:"]
    lines += [f"  {name:<10} {about}" for name, about in COMMANDS.items()]
    return "\n".join([*lines, "", "recycle COMMAND --help prints the options of a command."])


def _become(name: str, arguments: Sequence[str]) -> int:
    """Replaces this process with `python -m recycle_pp.NAME`, under the same process id and parent."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", f"recycle_pp.{name}", *arguments])


def _train(arguments: list[str]) -> int:
    """Runs a job on this machine alone. Blocks until the job has ended, and returns its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):  # prevents a traceback until torchrun sets its handlers
        signal.signal(number, lambda number, frame: os._exit(128 + number))
    from recycle_pp.command import os_errors_as_mistakes, say
    from recycle_pp.telemetry import startup
    from recycle_pp.telemetry.failure import refuse

    startup.begin("reads the settings")
    try:
        with os_errors_as_mistakes():
            pipelines, stages = _layout(arguments)
    except ValueError as error:
        startup.end()
        return refuse(str(error))
    workers = pipelines * stages
    if workers == 1:
        return _become("train", arguments)
    say(f"recycle_pp: starts torchrun for {workers} workers (parallel={pipelines}x{stages})")
    startup.update("imports torchrun")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would set the same value, but with a warning
    importlib.import_module("torch.distributed.run")
    startup.end()
    from recycle_pp.supervisor.torchrun import run_torchrun

    return run_torchrun([f"--nproc-per-node={workers}", "-m", "recycle_pp.train", *arguments])


def _layout(arguments: list[str]) -> tuple[int, int]:
    """(pipelines, stages) of the job, after validating its settings. Raises ValueError for a mistake in them."""
    from recycle_pp.config.checks import validate
    from recycle_pp.config.compose import compose
    from recycle_pp.telemetry.exporters.exporter import refuse_missing
    from recycle_pp.telemetry.heartbeat import refuse_running
    from recycle_pp.telemetry.run_folder import RunFolder
    from recycle_pp.train import continued

    if join := [text for text in arguments if text.lstrip("+").startswith("join=")]:
        raise ValueError(
            f"{join[0]}: the settings do not give the number of workers on this node; use "
            f"torchrun --nproc-per-node=WORKERS -m recycle_pp.train {join[0]}"
        )
    settings, _ = continued(compose(arguments), arguments)
    shape = settings.parallel.pipelines, settings.parallel.stages
    validate(settings, shape[0] * shape[1])
    refuse_missing(settings)
    refuse_running(RunFolder(settings.run.dir))
    return shape


if __name__ == "__main__":
    sys.exit(main())
