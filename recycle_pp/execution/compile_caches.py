"""Locates the folders in which Triton and torch keep compiled kernels, and measures compile times.

caches()                               # {"triton": Cache(folder, files=148, bytes=31_000_000), "inductor": ...}
with compiling(seconds): stage.warm()  # seconds: filled with Triton kernel -> compile time
"""

from __future__ import annotations

import getpass
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from recycle_pp.wire.messages.lifecycle import Cache

MOST_FILES = 100_000  # counting the files of a cache stops at about this number


def caches() -> dict[str, Cache]:
    """The caches of this process: triton, inductor."""
    return {name: _cache(folder) for name, folder in folders().items()}


def folders() -> dict[str, Path]:
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    user = str(os.getuid())
    with suppress(KeyError, OSError):  # the system knows no name for this user id
        user = getpass.getuser()
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or f"{tempfile.gettempdir()}/torchinductor_{user}"
    return {"triton": Path(os.environ.get("TRITON_CACHE_DIR") or f"{home}/.triton/cache"), "inductor": Path(inductor)}


@contextmanager
def compiling(seconds: dict[str, float]) -> Iterator[None]:
    """Measures the compilations of Triton kernels in the `with` block.

    seconds: filled with kernel -> seconds of its compilations; kernels that come from a cache are not counted
    """
    from triton import knobs  # imported here, because workers on a CPU do not need Triton

    def listener(*, src: Any, times: Any, cache_hit: bool, **about: Any) -> None:
        if not cache_hit:
            name = getattr(src, "name", None) or "?"
            seconds[name] = round(seconds.get(name, 0.0) + times.total / 1e6, 3)

    before, knobs.compilation.listener = knobs.compilation.listener, listener
    try:
        yield
    finally:
        knobs.compilation.listener = before


def _cache(folder: Path) -> Cache:
    files = size = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                size += os.stat(os.path.join(path, name)).st_size
                files += 1
        if files >= MOST_FILES:
            break
    return Cache(str(folder), files, size)
