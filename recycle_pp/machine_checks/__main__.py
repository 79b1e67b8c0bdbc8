"""Checks whether this machine can take part in a job, before the job starts.

    python -m recycle_pp.machine_checks
    python -m recycle_pp.machine_checks --run runs/mine --data tokens.bin --coordinator HOST0:29501 --json
    torchrun --nnodes=3 --node-rank=$RANK ... -m recycle_pp.machine_checks       # every machine, every pair of them
    srun --ntasks-per-node=1 python -m recycle_pp.machine_checks                 # the same

Takes some seconds, or half a minute with GPUs, and starts no worker. Exit code 0: well; 1: a warning; 2: do not train
here, or an error, which is printed as one sentence. Under torchrun or srun the machines also measure their links, and
machine 0 prints one table. All machines need the same RECYCLE_TOKEN, as in a job. torchrun itself ends with 1 instead
of 2.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from recycle_pp.command import exit_code, parser_of
from recycle_pp.wire.launch import Address, Launch, host_and_port

from .check import as_json, code, text
from .launched import Launched, launched
from .machine import check_machine, measure
from .member import Look, take_part
from .several import as_json as survey_as_json
from .several import judge, table
from .surveyor import Surveyor


def main(argv: Sequence[str] | None = None) -> int:
    about, _, more = (__doc__ or "").partition("\n\n")
    parser = parser_of("machine_checks", about, more)
    add_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return run(parser.parse_args(argv))


def add_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    # --run-dir, because torchrun takes --run for an abbreviation of its own option, even after the module's name
    about = "a run folder, which need not exist; under torchrun write --run-dir"
    parser.add_argument("--run", "--run-dir", dest="run", type=Path, default=Path("runs"), help=about)
    parser.add_argument("--data", type=Path, help="a file or a folder of training data")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="as control.address")


def run(arguments: argparse.Namespace) -> int:
    """Checks, prints and returns the exit code. arguments: those of `add_options`, and `json`."""

    def check() -> int:
        place = launched()
        if place is not None and not place.speaks:
            return 0
        at = host_and_port(arguments.coordinator, "--coordinator") if arguments.coordinator else None
        return _one(arguments, at) if place is None or place.machines == 1 else _several(arguments, place)

    return exit_code(check, "recycle_pp")


def _one(arguments: argparse.Namespace, at: tuple[str, int] | None) -> int:
    checks = check_machine(arguments.run, arguments.data, at)
    print(json.dumps(as_json(checks), indent=1) if arguments.json else text(checks))
    return code(checks)


def _several(arguments: argparse.Namespace, place: Launched) -> int:
    launch = Launch(master_address=place.address, master_port=place.port - 1)
    at = Address.of_cluster(launch, arguments.coordinator)
    place = place._replace(address=at.host, port=at.port)

    def look() -> Look:
        found = measure(arguments.run, arguments.data)
        checks = check_machine(arguments.run, arguments.data, (at.host, at.port), found, ports=())
        return Look(checks, found.run and found.run.rate, found.data and found.data.rate, found.gpus)

    if place.number != 0:
        return take_part(place, at.token, look)
    with Surveyor(place.machines, at.port, at.token) as surveyor:
        threading.Thread(target=_quietly, args=(lambda: take_part(place, at.token, look),), daemon=True).start()
        survey = surveyor.run()
        checks = judge(survey)
        print(json.dumps(survey_as_json(survey, checks), indent=1) if arguments.json else table(survey, checks))
        surveyor.end(code(checks))
    return code(checks)


def _quietly(part: Callable[[], int]) -> None:
    with suppress(ValueError, OSError):  # machine 0 is then missing from the table
        part()


if __name__ == "__main__":
    sys.exit(main())
