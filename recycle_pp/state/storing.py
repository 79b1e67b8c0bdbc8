"""Uploads the parts of checkpoints that this worker's node has on its disk, and seals checkpoints in the store.

    uploads = Uploads(settings, run_dir, about, send)    # about: see `checkpoint.describe`
    session.upload = uploads.asked           # requests of the coordinator to upload and to seal

A thread handles the requests one after the other while training continues. A killed process leaves objects that belong
to no seal. `StoredCheckpoints.prune` deletes them after a later checkpoint.
"""

from __future__ import annotations

import queue
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from recycle_pp.config.settings import Settings
from recycle_pp.storage.store import Store, StoreError
from recycle_pp.telemetry.checkpoint_folders import name, temporary
from recycle_pp.wire.messages.saving import Seal, Sealed, Upload, Uploaded, UploadFailed
from recycle_pp.wire.messages.table import Message

from . import checkpoint
from .checksum import TABLE
from .replacing import delete_unfinished
from .stored import StoredCheckpoints


class Uploads:
    def __init__(
        self, settings: Settings, run_dir: str, about: dict[str, Any], send: Callable[[Message], None]
    ) -> None:
        self._settings, self._about, self._send = settings, about, send
        self._folder = Path(run_dir) / "checkpoints"
        self._requests: queue.SimpleQueue[Upload | Seal] = queue.SimpleQueue()
        if settings.checkpoint.store is not None:
            threading.Thread(target=self._serve, name="store", daemon=True).start()

    def asked(self, message: Upload | Seal) -> None:
        self._requests.put(message)

    def _serve(self) -> None:
        while True:
            message = self._requests.get()
            try:
                # A new Store for each checkpoint reads the cloud's access keys again.
                stored = StoredCheckpoints(Store(self._settings.checkpoint.store or ""))
                if stored.is_whole(message.step):  # a repeated request, because the coordinator or a link was lost
                    self._send(Sealed(message.step))
                elif isinstance(message, Upload):
                    self._send(Uploaded(message.step, message.parts, self._upload(stored, message)))
                elif self._seal(stored, message):
                    with suppress(StoreError):  # the next seal prunes again
                        of = self._settings.checkpoint
                        stored.prune(message.step, of.keep, message.losses if of.keep_best else None)
                    self._send(Sealed(message.step))
                else:
                    self._send(UploadFailed(message.step, "the store has another checkpoint of this step"))
            except Exception as error:  # a failed upload must not stop training
                self._send(UploadFailed(message.step, str(error) or type(error).__name__))

    def _upload(self, stored: StoredCheckpoints, message: Upload) -> dict[str, list[int]]:
        delete_unfinished(self._folder, message.step)  # parts that no worker has merged on this node
        finished = self._folder / name(message.step)
        files: dict[str, list[int]] = {}
        for part in message.parts:
            of = finished if (finished / part).is_dir() else temporary(self._folder, message.step)
            files |= stored.upload(message.step, of / part)
        return files

    def _seal(self, stored: StoredCheckpoints, message: Seal) -> bool:
        finished = self._folder / name(message.step)
        about = self._about | checkpoint.position(message.outer)
        if all((finished / part).is_dir() for part in message.parts):
            return stored.seal(message.step, about, message.files, finished / TABLE)
        with tempfile.TemporaryDirectory() as made:
            place = Path(made)
            tables = [file for file in message.files if Path(file).name in (TABLE, checkpoint.TOGETHER)]
            stored.fetch_files(message.step, tables, place)
            table, data = checkpoint.merged(place, message.parts)
            (place / TABLE).write_bytes(table)
            files = {file: of for file, of in message.files.items() if file in data}
            return stored.seal(message.step, about, files, place / TABLE)
