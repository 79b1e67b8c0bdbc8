"""A summary of a run in a few lines: deaths, their causes and cost, and the loss.

python -m recycle_pp.report runs/mine      # without an argument: the newest run under runs/
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from recycle_pp.command import exit_code, parser_of
from recycle_pp.telemetry.report import report
from recycle_pp.telemetry.run_folder import newest_run
from recycle_pp.telemetry.stored_run import local


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0, or 2 after printing one sentence about an error."""
    return exit_code(lambda: _run(arguments), "recycle_pp")


def _run(arguments: Sequence[str]) -> int:
    parser = parser_of("report", __doc__)
    parser.add_argument("run", nargs="?", help="folder of the run (default: the newest under runs/)")
    given = parser.parse_args(arguments)
    print(report(newest_run(given.run and local(given.run))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
