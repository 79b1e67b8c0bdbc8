"""Carries compiled kernels between machines, in the shared folder `run.compile_cache`.

    carrier = Carrier("/shared/compiled", log)      # before anything is compiled
    carrier.read()                                  # copies what this machine lacks
    carrier.write()                                 # copies what was compiled since `Carrier(...)`, in a thread
    executor.on_commit.append(carrier.stepped)      # writes again after the first step, which also compiles

An entry is a folder in a machine's cache. It contains all files of one Triton kernel or one inductor graph. The shared
folder stores each entry as one file: a checksum, then the compressed files. Several workers may write the same entry at
once, because each write replaces the whole file and an entry has the same content on every machine. A damaged file is
removed, and the next worker that compiles this entry writes it again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from recycle_pp.numerics.gradients import Reduced
from recycle_pp.wire.messages.steps import Commit

from .compile_caches import folders

GROUP = "__grp__"  # prefix of the file in which Triton lists a kernel's files by full path; Triton writes it last
LIBRARY = ".so"  # suffix of the kernel launchers that Triton compiles; such an entry contains no other file
ENTRY = ".entry"  # suffix of a shared file: a SHA-256, then compressed MessagePack (file name -> content)


class Damaged(ValueError):
    """The content of a file in the shared folder is damaged."""


class Carrier:
    """Reads and writes the shared folder. If that fails, logs a line and continues. Does nothing if no folder is
    set."""

    def __init__(self, folder: str | None, log: Callable[[str], None]) -> None:
        self._carried = CarriedCaches(Path(folder), folders()) if folder else None
        self._log = log
        self._stepped = False

    def read(self) -> None:
        self._try("read from", lambda carried: carried.read())

    def write(self) -> None:
        if self._carried is not None:
            act = partial(self._try, "written to", lambda carried: carried.write())
            threading.Thread(target=act, name="compile cache", daemon=True).start()

    def stepped(self, commit: Commit, reduced: Reduced) -> None:
        if not self._stepped:
            self._stepped = True
            self.write()

    def _try(self, what: str, act: Callable[[CarriedCaches], Carried]) -> None:
        if self._carried is None:
            return
        begun = time.monotonic()
        try:
            done = act(self._carried)
        except OSError as error:
            return self._log(f"run.compile_cache: nothing was {what} the folder: {error}")
        if any(done):
            size, seconds = f"{done.bytes / 1e6:.1f} MB", f"{time.monotonic() - begun:.1f} s"
            damaged = f"; {done.damaged} damaged entries were removed" if done.damaged else ""
            self._log(f"run.compile_cache: {what} the folder: {done.entries} entries ({size}) in {seconds}{damaged}")


class Carried(NamedTuple):
    entries: int = 0
    bytes: int = 0
    damaged: int = 0


class CarriedCaches:
    def __init__(self, shared: Path, caches: Mapping[str, Path]) -> None:
        """caches: name of a cache -> its folder on this machine."""
        self._shared, self._caches = shared, caches
        self._begun = time.time()

    def read(self) -> Carried:
        """Copies the entries that this machine lacks. Raises OSError if the shared folder or a cache cannot be used."""
        entries = size = damaged = 0
        for name, cache in self._caches.items():
            for path in sorted((self._shared / name).rglob(f"*{ENTRY}")):
                entry = cache / path.relative_to(self._shared / name).with_suffix("")
                if entry.exists():
                    continue
                try:
                    size += _unpack(path, entry)
                    entries += 1
                except FileNotFoundError:
                    continue  # another worker has just removed it
                except Damaged:
                    path.unlink(missing_ok=True)
                    damaged += 1
        return Carried(entries, size, damaged)

    def write(self) -> Carried:
        """Copies new entries to the shared folder. Raises OSError if that folder cannot be written to."""
        entries = size = 0
        for name, cache in self._caches.items():
            for entry, files in _entries(cache, self._begun):
                path = self._shared / name / entry.relative_to(cache).with_name(entry.name + ENTRY)
                if not path.exists() and (name != "triton" or _is_complete(files)):
                    size += _pack(path, entry, files)
                    entries += 1
        return Carried(entries, size)


def _entries(cache: Path, since: float) -> Iterator[tuple[Path, list[str]]]:
    """(folder, names of its files) for each entry that has changed after the time `since`, in seconds since 1970."""
    for folder, inner, files in os.walk(cache):
        if any(name.startswith("tmp.") for name in inner):  # Triton is still writing an entry
            inner[:] = []
            continue
        with suppress(FileNotFoundError):
            if files and Path(folder) != cache and os.stat(folder).st_mtime >= since - 1.0:
                yield Path(folder), sorted(files)


def _is_complete(files: Sequence[str]) -> bool:
    return any(name.startswith(GROUP) for name in files) or all(name.endswith(LIBRARY) for name in files)


def _pack(path: Path, entry: Path, files: Sequence[str]) -> int:
    """Writes an entry to the file `path` of the shared folder. Returns the number of bytes written."""
    content = zlib.compress(msgspec.msgpack.encode({name: (entry / name).read_bytes() for name in files}))
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, new = tempfile.mkstemp(dir=path.parent, suffix=".new")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(hashlib.sha256(content).digest() + content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(new, 0o644)
        os.replace(new, path)
    except BaseException:
        os.unlink(new)
        raise
    return len(content)


def _unpack(path: Path, entry: Path) -> int:
    """Writes the files of an entry to the cache, all at once. Returns their size in bytes. Raises Damaged."""
    data = path.read_bytes()
    size = hashlib.sha256().digest_size
    if hashlib.sha256(data[size:]).digest() != data[:size]:
        raise Damaged(path)
    files = msgspec.msgpack.decode(zlib.decompress(data[size:]), type=dict[str, bytes])
    if any(Path(name).name != name for name in files):
        raise Damaged(path)
    entry.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(dir=entry.parent, prefix="tmp.carried-"))
    try:
        for name, content in files.items():
            (new / name).write_bytes(_relocated(content, entry) if name.startswith(GROUP) else content)
        with suppress(OSError):  # fails if another worker on this machine has already put the entry there
            new.rename(entry)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return sum(map(len, files.values()))


def _relocated(group: bytes, entry: Path) -> bytes:
    """Triton's list of files (`group`), with the paths replaced by those on this machine."""
    listed = json.loads(group)
    listed["child_paths"] = {name: str(entry / name) for name in listed["child_paths"]}
    return json.dumps(listed).encode()
