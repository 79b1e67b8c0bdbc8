"""Does work only once, shared by all processes of pytest.

result = once(folder, "fault-free 2x2", lambda: run_a_job())     # `folder`: the fixture `shared_folder`
"""

import fcntl
import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def shared_folder(request, tmp_path_factory) -> Path:
    """A new folder shared by all processes of this run of pytest."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if hasattr(request.config, "workerinput") else base


def once(folder: Path, name: str, make: Callable[[], Any]) -> Any:
    """The result of `make`. One process calls it; the others wait for the result. If it fails, the next one tries."""
    path = folder / f"once-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            result = pickle.dumps(make())
            path.write_bytes(result)
    return pickle.loads(path.read_bytes())
