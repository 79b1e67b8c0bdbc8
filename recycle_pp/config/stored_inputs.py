"""The data and models that the settings name by the URL of a store.

stored_inputs(settings)       # {"s3://bucket/corpus.bin": False}: URL -> whether small objects are enough
"""

from __future__ import annotations

from recycle_pp.storage.local_copy import is_stored

from .settings import Settings


def stored_inputs(settings: Settings) -> dict[str, bool]:
    """The URLs that a worker needs on its disk: URL -> whether to copy only small objects (`storage.local_copy`).

    A tokenizer needs only small objects. So does a model whose weights are not read (model.init=random).
    """
    data, model = settings.data, settings.model
    named = [(data.tokenizer, True), (model.path, model.init == "random" and model.kind != "custom")]
    for value in (data.path, data.validation_path):
        named += [(path, False) for path in (value if isinstance(value, list) else [value])]
    found: dict[str, bool] = {}
    for path, small in named:
        if path is not None and is_stored(path):
            found[path] = small and found.get(path, True)
    return found
