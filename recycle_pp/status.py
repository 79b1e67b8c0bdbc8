"""Prints the state of a run: running or dead, step, speed, loss, live workers, last deaths, stalls, ETA.

    python -m recycle_pp.status runs/mine              # without an argument: the newest under runs/
    python -m recycle_pp.status runs/mine --watch
    python -m recycle_pp.status runs/mine --json

Works in any terminal on any node that has the run folder. Exit code 0: the run is running or has finished; 1: it is
dead, silent or stopped; 2: an error, printed as one sentence.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

from recycle_pp.command import exit_code, parser_of
from recycle_pp.telemetry.run_folder import newest_run
from recycle_pp.telemetry.status import Status, StatusReader, text
from recycle_pp.telemetry.stored_run import local

WATCH_SECONDS = 1.0
CLEAR = "\x1b[H\x1b[J"  # moves to the top left of the terminal and clears it


def main(argv: Sequence[str] | None = None) -> int:
    about, _, more = (__doc__ or "").partition("\n\n")
    parser = parser_of("status", about, more)
    parser.add_argument(
        "run", nargs="?", help="a run folder, or the URL of its checkpoint.store; default: the newest under runs/"
    )
    parser.add_argument("--json", action="store_true", help="print JSON; with --watch one object per line")
    parser.add_argument("--watch", action="store_true", help="repeat until the run has ended or Ctrl-C")
    arguments = parser.parse_args(argv)
    try:
        reader = StatusReader(newest_run(arguments.run and local(arguments.run)))
        status = reader.read()
        _show(status, arguments)
        while arguments.watch and status.state in ("starting", "running", "silent"):
            time.sleep(WATCH_SECONDS)
            status = reader.read()
            _show(status, arguments)
    except ValueError as error:
        print(f"recycle_pp: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    return 0 if status.state in ("starting", "running", "finished") else 1


def _show(status: Status, arguments: argparse.Namespace) -> None:
    if arguments.json:
        print(json.dumps(status.to_json(), indent=None if arguments.watch else 1), flush=True)
    else:
        start = CLEAR if arguments.watch and sys.stdout.isatty() else ""
        print(start + text(status), flush=True)


if __name__ == "__main__":
    sys.exit(exit_code(main, "recycle_pp"))
