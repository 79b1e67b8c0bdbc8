"""checkpoint.store: copies the small files of the run folder to the store every SECONDS (`telemetry.stored_run`).

`recycle status s3://...` reads them, and so does a resume on a machine without the run folder.
"""

from __future__ import annotations

import sys
import threading

from recycle_pp.storage.store import Store, StoreError
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.telemetry.stored_run import RunCopy

from .exporter import Exporter

SECONDS = 10.0
PATIENCE_SECONDS = 5.0  # how long to retry a failing request; after that, the next update tries again


class Copying(Exporter):
    def __init__(self, run: RunFolder, url: str) -> None:
        self._run, self._url = run, url
        self._copy = RunCopy(run, Store(url, PATIENCE_SECONDS))
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _repeat(self) -> None:
        """Copies until the job is over, and once more after that."""
        self._update()
        while not self._closing.wait(SECONDS):
            self._update()
        self._update()

    def _update(self) -> None:
        try:
            self._copy.update()
        except (StoreError, OSError) as error:
            print(f"the run's files were not copied: {error}", file=sys.stderr, flush=True)
            # The new store reads the credentials again, because they may have expired.
            self._copy = RunCopy(self._run, Store(self._url, PATIENCE_SECONDS))
