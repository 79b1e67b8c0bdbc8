"""run.on_event: runs a shell command for every event, with the event's line of JSON on standard input.

    run.on_event='jq -r .event >> events.txt'

Commands run one at a time, in the order of the events. A command that takes longer than SECONDS is killed together with
its child processes. If the commands fall far behind, older events are skipped and counted in the log.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress

from recycle_pp.telemetry.run_folder import RunFolder

from .exporter import Exporter, Record

SECONDS = 10.0


class Command(Exporter):
    def __init__(self, run: RunFolder, command: str) -> None:
        self._command = command
        self._environment = {**os.environ, "RECYCLE_RUN_DIR": str(run.path)}
        self._environment.pop("RECYCLE_TOKEN", None)  # the job's secret

    def event(self, record: Record) -> None:
        process = subprocess.Popen(
            ["/bin/sh", "-c", self._command], stdin=subprocess.PIPE, env=self._environment, start_new_session=True
        )
        try:
            process.communicate(json.dumps(record, separators=(",", ":")).encode() + b"\n", timeout=SECONDS)
            end = f"ended with code {process.returncode}" if process.returncode else ""
        except subprocess.TimeoutExpired:
            end = f"killed after {SECONDS:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if end:
            print(f"run.on_event={self._command!r} on {record['event']}: {end}", file=sys.stderr, flush=True)
