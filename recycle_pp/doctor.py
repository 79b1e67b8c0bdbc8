"""Finds out why a run hangs or died, and prints the verdict, the evidence, and the next command to type.

    python -m recycle_pp.doctor runs/mine
    python -m recycle_pp.doctor runs/mine --json
    python -m recycle_pp.doctor                   # checks this machine: python -m recycle_pp.machine_checks
    torchrun --nnodes=3 ... -m recycle_pp.doctor  # checks every machine, and every pair of them

Works while the job runs, hangs or is dead, on any machine that has the run folder. Reports the newest stall or death,
even if the job has recovered since. Exit code 0: well; 1: a warning, the job continues or has ended; 2: broken, or an
error. The page docs/doctor.md explains the verdicts.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from recycle_pp.command import exit_code, parser_of
from recycle_pp.diagnosis.diagnosis import Diagnosis, diagnose
from recycle_pp.diagnosis.finding import BROKEN, WARNING, WELL
from recycle_pp.machine_checks import __main__ as machine_checks
from recycle_pp.machine_checks.facts import within
from recycle_pp.telemetry.evidence import gather
from recycle_pp.telemetry.heartbeat import longest_look
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.telemetry.run_reader import RunReader
from recycle_pp.telemetry.stored_run import local

READ_SECONDS = 40.0  # time limit for reading the run folder, without the wait for a heartbeat
_LOGS = ("never_started",)  # verdicts for which the last line of the log matters
_COLOURS = {WELL: "\x1b[32m", WARNING: "\x1b[33m", BROKEN: "\x1b[31m"}


def main(argv: Sequence[str] | None = None) -> int:
    about, _, more = (__doc__ or "").partition("\n\n")
    parser = parser_of("doctor", about, more)
    parser.add_argument(
        "folder",
        metavar="RUN",
        nargs="?",
        help="a run folder (default: check this machine, or under torchrun all machines)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    machine_checks.add_options(parser.add_argument_group("without a run"))
    arguments = parser.parse_args(argv)
    if arguments.folder is None:
        return machine_checks.run(arguments)
    try:
        diagnosis = of_run(arguments.folder)
    except ValueError as error:
        print(f"recycle_pp: {error}", file=sys.stderr)
        return BROKEN
    if arguments.json:
        shown = {key: getattr(diagnosis, key) for key in ("verdict", "worker", "evidence", "next")}
        print(json.dumps(shown, indent=1))
    else:
        print(text(diagnosis, sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    return diagnosis.code


def of_run(path: str, seconds: float = READ_SECONDS) -> Diagnosis:
    """The diagnosis of a run. Waits at most `seconds` for the file system of its folder, and longer for a heartbeat.

    Raises ValueError if the folder contains no run, or if its config.yaml is damaged, and OSError if it cannot be read.
    """
    found = within(seconds, lambda: _open(path))
    diagnosis = None if found is None else within(seconds + found[1], lambda: _read(found[0]))
    if diagnosis is None:
        silent = f"the file system of {path} has not answered for {seconds:.0f} s"
        return Diagnosis("storage", None, [silent], f"df -h {path}", BROKEN)
    return diagnosis


def text(diagnosis: Diagnosis, colour: bool = False) -> str:
    """The text to print: the verdict, the evidence and the next command, on separate lines."""
    worker = f": worker {diagnosis.worker}" if diagnosis.worker else ""
    grade = " (the job continues)" if diagnosis.code == WARNING and not diagnosis.ended else ""
    verdict = f"{diagnosis.verdict}{worker}"
    if colour:
        verdict = f"{_COLOURS[diagnosis.code]}\x1b[1m{verdict}\x1b[0m"
    return "\n".join([verdict + grade, *(f"  {line}" for line in diagnosis.evidence), f"next: {diagnosis.next}"])


def _open(path: str) -> tuple[RunFolder, float]:
    """The run folder, and the longest time that a look at its heartbeat waits, in seconds."""
    run = RunFolder(local(path))
    return run, longest_look(run)


def _read(run: RunFolder) -> Diagnosis:
    diagnosis = diagnose(gather(run))
    return diagnosis._replace(evidence=[*diagnosis.evidence, *_details(diagnosis, RunReader(run))])


def _details(diagnosis: Diagnosis, reader: RunReader) -> list[str]:
    """A sentence with the line of a log, or of a stack trace, that belongs to the verdict; [] if there is none."""
    if diagnosis.next.endswith(".txt"):
        line = reader.stuck_at(diagnosis.next.rpartition("/")[2])
        return [f"its main thread was in {line}"] if line else []
    if diagnosis.worker and diagnosis.verdict in _LOGS:
        line = reader.last_line(diagnosis.worker)
        return [f"its log ends with: {line}"] if line else []
    return []


if __name__ == "__main__":
    sys.exit(exit_code(main, "recycle_pp"))
