"""Trains a model: what torchrun starts, once for every worker.

    torchrun --nproc-per-node=12 -m recycle_pp.train parallel=3x4 +fail_at=20:1.2 +rejoin_at=40:1.2
    python -m recycle_pp.train parallel=1x1 model=tiny          # one worker needs no torchrun
    torchrun --nproc-per-node=4 -m recycle_pp.train +join=10.0.0.1:29501    # a new node, for a job that runs
    python -m recycle_pp.train --help                           # every key

Each of these processes becomes a supervisor (`recycle_pp.supervisor`); rank 0 reads the configuration first. A mistake
in it ends the process with exit code 2 and one sentence, before any worker starts. Other codes: 0 done, 1 the
job failed, 130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys

from recycle_pp.config.settings import Settings
from recycle_pp.supervisor.child import die_with_parent
from recycle_pp.supervisor.supervisor import supervise
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.wire.join import find_place
from recycle_pp.wire.launch import Address, Launch


def main(arguments: list[str]) -> int:
    """The exit code of this rank's process. arguments: the command line without the program's name."""
    try:
        launch = Launch.from_environment()
        if {"--help", "-h"} & set(arguments):
            if launch.rank == 0:
                from recycle_pp.config.compose import help_text

                print(help_text())
            return 0
        if (job := find_place(arguments)) is not None:
            return asyncio.run(supervise(launch, job, joins=True))
        settings, run, address = prepare(launch, arguments)
    except ValueError as error:
        print(f"recycle_pp: {error}", file=sys.stderr)
        return 2
    return asyncio.run(supervise(launch, address, settings, run))


def prepare(launch: Launch, arguments: list[str]) -> tuple[Settings | None, RunFolder | None, Address | None]:
    """What this rank must know before it can join; of one node's ranks only rank 0 reads the configuration."""
    if launch.rank > 0 and launch.one_node:
        return None, None, None
    from recycle_pp.config.compose import compose

    settings = compose(arguments)
    if launch.rank == 0:
        from recycle_pp.config.checks import validate
        from recycle_pp.telemetry.exporters.exporter import refuse_missing

        validate(settings, launch.world)
        refuse_missing(settings)
    address = None
    if not launch.one_node or settings.control.address is not None:
        address = Address.of_cluster(launch, settings.control.address)
    if launch.rank > 0:
        return None, None, address
    run = RunFolder.create(settings)
    if settings.run.resume:
        from recycle_pp.coordinator.checkpoints import Saving

        done = Saving(run.checkpoints, settings.parallel.stages).steps_done()
        if done >= settings.run.steps:
            raise ValueError(f"run.steps must be above {done}, the steps that run.dir={run.path} has done already")
    return settings, run, address


if __name__ == "__main__":
    # Until the supervisor takes the signals over: no traceback for a Ctrl-C. It also ends with torchrun's agent.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: os._exit(128 + number))
    faulthandler.enable()
    if "RANK" in os.environ:
        die_with_parent(os.getppid(), signal.SIGTERM)
    sys.exit(main(sys.argv[1:]))
