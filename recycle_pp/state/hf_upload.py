"""Exports a checkpoint to an object store, as `hf_folder` does to a folder.

refuse_stored("s3://bucket/models/mine")                 # an early check: ValueError if there is a model at the URL
upload(model, "s3://bucket/models/mine")                 # blocks until the objects are in the store
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from recycle_pp.storage.store import Store

from .hf_folder import SHARD, Exported, write_weights

LOOK_SECONDS = 20.0  # time for which `refuse_stored` repeats a request if the store does not answer


def refuse_stored(url: str) -> None:
    """Raises ValueError if there is a model at this URL, StoreError if the store cannot be used."""
    store = Store(url, LOOK_SECONDS)
    store.probe()
    if {"config.json", "adapter_config.json"} & store.list().keys():
        raise ValueError(f"{url} already contains a model; choose another place")


def upload(model: Exported, url: str, shard: int = SHARD, report: Callable[[int, int], None] | None = None) -> bool:
    """Like `hf_folder.write`, but writes to a URL of a store. At most one weights file is on the disk at a time.

    The file that makes the model loadable is uploaded last, so a killed upload leaves no loadable model and can be
    repeated.

    Raises ValueError if there is a model at this URL, StoreError if the store fails.
    """
    store = Store(url)
    there = [path for path in store.list() if "/" not in path]
    if set(model.entries) & set(there):
        raise ValueError(f"{url} already contains a model; choose another place")
    store.delete(path for path in there if path.startswith(f"{model.stem}.") or path.startswith(f"{model.stem}-"))
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        has_tokenizer = model.write_config(folder)
        for file in folder.iterdir():
            if file.name not in model.entries:
                store.put_file(file.name, file)
        for file in write_weights(model, folder, shard, report or (lambda done, total: None)):
            store.put_file(file.name, file)
            file.unlink()
        for file in folder.iterdir():
            if file.name in model.entries:
                store.put_file(file.name, file)
    return has_tokenizer
