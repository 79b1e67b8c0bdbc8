"""Exports the new lines of a run folder, until the job is over.

    python -m recycle_pp.telemetry.exporters [--skip=METRICS,EVENTS] RUN_DIR NAME [ARGUMENT]

--skip: bytes at the beginning of metrics.jsonl and events.jsonl that were exported earlier. The process ends when its
standard input is closed. The coordinator holds the other end, so the process ends with the job or the coordinator. On a
terminal, the process ends with the run or on Ctrl-C.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from recycle_pp.telemetry.follower import Follower
from recycle_pp.telemetry.heartbeat import Pulse
from recycle_pp.telemetry.run_folder import RunFolder

from .exporter import TOO_SLOW, Exporter, make

POLL_SECONDS = 0.2
LAST_SECONDS = 8  # time limit for the remaining records once the job is over
MOST_BEHIND = 1000  # maximum number of records exported in each poll but the first; older ones are skipped


def main(arguments: Sequence[str]) -> int:
    skip = [0, 0]
    if arguments and arguments[0].startswith("--skip="):
        skip = [int(size) for size in arguments[0].removeprefix("--skip=").split(",")]
        arguments = arguments[1:]
    if len(arguments) < 2:
        print(f"usage: {(__doc__ or '').splitlines()[2].strip()}", file=sys.stderr)
        return 2
    run = RunFolder(arguments[0])
    name = arguments[1]
    try:
        exporter = make(name, run, *arguments[2:])
    except (ValueError, ImportError, OSError, TypeError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    if not sys.stdin.isatty():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the job, and this process ends after the job
    follow(run, exporter, *skip)
    return 0


def follow(run: RunFolder, exporter: Exporter, metrics: int = 0, events: int = 0) -> None:
    """Exports all records of a run. Blocks until the job is over, or until Ctrl-C.

    metrics, events: bytes at the beginning of these files to skip
    """
    with suppress(KeyboardInterrupt):
        _export(run, exporter, metrics, events)
    exporter.close()


def _export(run: RunFolder, exporter: Exporter, metrics: int, events: int) -> None:
    pulse = Pulse(run)
    files = (Follower(run.metrics, metrics), exporter.step), (Follower(run.events, events), exporter.event)
    over, most = False, sys.maxsize  # the first poll takes all records of a run that has ended
    while True:
        for follower, take in files:
            new = follower.new()
            if len(new) > most:
                print(f"{TOO_SLOW}{len(new) - most} records are skipped", file=sys.stderr, flush=True)
            for record in new[-most:]:
                take(record)
        most = MOST_BEHIND
        if over:
            return
        over = _over(run, pulse)
        if over:
            signal.alarm(LAST_SECONDS)  # ends this process if the exporter hangs


def _over(run: RunFolder, pulse: Pulse) -> bool:
    """Whether the job is over: standard input is closed or, on a terminal, summary.json exists or the heartbeat has
    ended.

    Waits for up to POLL_SECONDS.
    """
    if sys.stdin.isatty():
        select.select([], [], [], POLL_SECONDS)
        return run.summary.exists() or pulse.ended()
    ready = select.select([sys.stdin], [], [], POLL_SECONDS)[0]
    return bool(ready) and not os.read(sys.stdin.fileno(), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
