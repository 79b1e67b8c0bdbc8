"""Checks whether this machine can take part in a job, before the job starts.

    python -m recycle_pp.machine_checks
    python -m recycle_pp.machine_checks --run runs/mine --data tokens.bin --coordinator HOST0:29501 --json

Takes some seconds and starts no worker. Exit code 0: well; 1: a warning; 2: do not train here, or an error, which is
printed as one sentence. Only this machine is checked: start it on each node.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from recycle_pp.command import exit_code
from recycle_pp.wire.launch import HOST_AND_PORT

from .check import as_json, code, text
from .machine import check_machine


def main(argv: Sequence[str] | None = None) -> int:
    about, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        "python -m recycle_pp.machine_checks",
        description=about,
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--run", type=Path, default=Path("runs"), help="a run folder, which need not exist")
    parser.add_argument("--data", type=Path, help="a file or a folder of training data")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="as control.address")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)

    def run() -> int:
        place = HOST_AND_PORT.fullmatch(arguments.coordinator) if arguments.coordinator else None
        if arguments.coordinator and not place:
            raise ValueError(f"--coordinator must be HOST:PORT, not {arguments.coordinator!r}")
        checks = check_machine(arguments.run, arguments.data, (place[1], int(place[2])) if place else None)
        print(json.dumps(as_json(checks), indent=1) if arguments.json else text(checks))
        return code(checks)

    return exit_code(run, "recycle_pp")


if __name__ == "__main__":
    sys.exit(main())
