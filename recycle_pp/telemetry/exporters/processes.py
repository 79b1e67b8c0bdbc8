"""The exporter processes of a job, which the coordinator starts and ends.

exporters = Exporters(settings, run)
exporters.look()                # call it periodically; warns once if an exporter has ended too early
await exporters.close()
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from recycle_pp.config.settings import Settings
from recycle_pp.telemetry.background import Background
from recycle_pp.telemetry.guard import guarded
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.telemetry.warn import warn_once

from .exporter import SETTINGS, TOO_SLOW, wanted

CLOSE_SECONDS = 10.0  # time limit for the last records
TAIL = 4096  # bytes at the end of a log that are read


class Exporters:
    """Starts, watches and ends the exporters of a job. The methods do not block: a thread does their work in order."""

    def __init__(self, settings: Settings, run: RunFolder) -> None:
        self._run = run
        self._later = Background("exporters")
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._begin: dict[str, int] = {}  # size of each log at the start of the process that writes it
        self._ended = False
        if wanted(settings):
            self._later(self._start, settings)

    def look(self) -> None:
        if self._processes:
            self._later(self._look)

    async def close(self) -> None:
        """Ends the exporters. Waits at most one second longer than CLOSE_SECONDS.

        Records that have not arrived by then stay in the run folder, but are missing in the exporter's tool.
        """
        self._later(self._close)
        await self._later.flushed(CLOSE_SECONDS + 1.0)

    def kill(self) -> None:
        """Kills all exporters, including those that have not started yet."""
        self._ended = True
        for process in list(self._processes.values()):
            process.kill()

    # -- in the thread -----------------------------------------------------------------------------------------

    @guarded
    def _start(self, settings: Settings) -> None:
        run = self._run
        # Skip the existing lines, which were exported before a resume or under an earlier coordinator.
        known = ",".join(str(_size(path)) for path in (run.metrics, run.events))
        for name, arguments in wanted(settings).items():
            command = [sys.executable, "-m", __package__ or "", f"--skip={known}", str(run.path), name, *arguments]
            with suppress(OSError), open(self._log(name), "ab") as log:
                self._begin[name] = log.tell()
                process = self._processes[name] = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
                )
                if self._ended:
                    process.kill()

    @guarded
    def _look(self) -> None:
        for name, process in list(self._processes.items()):
            if process.poll() is not None:
                self._report(name)
            elif TOO_SLOW in self._said(name):
                self._warn_of_skipped(name)

    @guarded
    def _close(self) -> None:
        deadline = time.monotonic() + CLOSE_SECONDS
        for process in self._processes.values():
            assert process.stdin is not None
            with suppress(OSError):  # the process has ended
                process.stdin.close()
        for name, process in list(self._processes.items()):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
                self._report(name)
            except subprocess.TimeoutExpired:
                process.kill()
                warn_once(f"{SETTINGS[name]} lacks the last records, because its process hangs ({self._log(name)})")

    def _report(self, name: str) -> None:
        process = self._processes.pop(name)
        if TOO_SLOW in self._said(name):
            self._warn_of_skipped(name)
        if process.returncode:
            warn_once(f"{SETTINGS[name]} has ended with code {process.returncode}: {self._last_words(name)}")

    def _warn_of_skipped(self, name: str) -> None:
        warn_once(f"{SETTINGS[name]} is too slow and skips records ({self._log(name)})")

    def _last_words(self, name: str) -> str:
        lines = self._said(name).strip().splitlines()
        return f"{lines[-1][:200]} ({self._log(name)})" if lines else "its log is empty"

    def _said(self, name: str) -> str:
        """The newest part of what the process has written to its log."""
        with suppress(OSError), self._log(name).open("rb") as log:
            log.seek(max(self._begin[name], log.seek(0, os.SEEK_END) - TAIL))
            return log.read().decode(errors="replace")
        return ""

    def _log(self, name: str) -> Path:
        return self._run.logs / f"{name}.log"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
