"""run.evaluate: evaluates checkpoints during the training, one at a time (`recycle_pp.evaluate`).

Checkpoints that are saved during an evaluation are skipped, except for the newest one. An evaluation that is running
when the job ends is stopped.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import suppress

from recycle_pp.telemetry.run_folder import RunFolder

from .exporter import Exporter, Record


class Evaluations(Exporter):
    def __init__(self, run: RunFolder) -> None:
        self._run, self._newest = run, 0
        self._process: subprocess.Popen[bytes] | None = None
        self._changed = threading.Condition()
        self._closed = False
        threading.Thread(target=self._serve, name="evaluations", daemon=True).start()

    def event(self, record: Record) -> None:
        # Without a shared folder, there is no `checkpoint_saved`, because a checkpoint is complete only in the store.
        if record["event"] in ("checkpoint_saved", "checkpoint_stored"):
            with self._changed:
                self._newest = max(self._newest, record["checkpoint"])
                self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            if self._process is not None:
                with suppress(ProcessLookupError):
                    self._process.terminate()

    def _serve(self) -> None:
        done = 0
        while True:
            with self._changed:
                while self._newest <= done:
                    self._changed.wait()
                if self._closed:
                    return
                done = self._newest
                arguments = [str(self._run.path), "--step", str(done), "--beside"]
                self._process = subprocess.Popen([sys.executable, "-m", "recycle_pp.evaluate", *arguments])
            self._process.wait()
