"""Copies objects from a store to this machine's disk, so that settings can name data and models by a URL.

    place("s3://bucket/corpus.bin")               # path of the copy, whether or not it exists
    copy("s3://bucket/corpus.bin")                # blocks until the copy is complete and up to date
    copy("s3://bucket/models/llama", small=True)  # skips large objects, such as weights
    is_copied("s3://bucket/corpus.bin")           # whether there is a complete copy, perhaps an outdated one
    copy_apart({"s3://bucket/corpus.bin": False}) # calls `copy` in a separate process; the value is `small`

    python -m recycle_pp.storage.local_copy [--small] URL...      # that process; prints progress on standard error

A URL names one object, a folder, or a pair PREFIX.idx and PREFIX.bin. Files PREFIX.bin.json and PREFIX.idx are copied
together with PREFIX.bin, if they exist. Processes of one machine share a copy: they take turns, and the first one
fetches. If it is killed, the next one continues with the pieces that are on the disk. A file appears only when it is
complete, and its modification time is that of the object.

The copy of a URL is a folder in `cache_folder("store")`:

    copy.json           the copied objects: path -> [size in bytes, version]
    lock                held by the process that fetches
    files/corpus.bin    the copies
    partial/1a2b3c4d    the first bytes of an object that is being fetched
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

from .store import PIECE, Absent, Object, Store, StoreError, folder_of
from .turn import turn

LOOK_SECONDS = 20.0  # how long to retry a request for the objects' versions if the store does not answer
SMALL = 64 << 20  # maximum bytes of an object that is copied with `small`
SYNCED = 4 * PIECE  # bytes of a partial file between two syncs
RECORD_SECONDS = 5.0  # minimum time between two updates of copy.json during a fetch
REPORT_SECONDS = 4.0  # between two lines of progress

Report = Callable[[int, int], None]  # (bytes that are on this disk, bytes of all objects)


def is_stored(name: str) -> bool:
    """Whether `name` is the URL of objects in a store, not a path of files."""
    return re.match("(s3|gs|az)://", name) is not None


def place(name: str) -> Path:
    """The path of the copy if `name` is the URL of a store; otherwise `name` as a path. Reads nothing."""
    if not is_stored(name):
        return folder_of(name) or Path(name)
    return _home(name) / "files" / _split(name)[1]


def cache_folder(name: str) -> Path:
    """$XDG_CACHE_HOME/recycle_pp/NAME, by default below ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "recycle_pp" / name


def copy(url: str, small: bool = False, report: Report = lambda done, total: None) -> Path:
    """Brings the copy up to date, and returns `place(url)`. If the store fails and there is a complete copy, prints a
    warning and uses that copy.

    report  called a few times a second while this process waits or fetches

    Does not ask the store if another process of this machine has asked it during this call.

    Raises StoreError, with one sentence, if there are no such objects, or if they cannot be fetched and there is no
    complete copy.
    """
    home, began = _home(url), time.time()
    try:
        home.mkdir(parents=True, exist_ok=True)
        with turn(home, lambda: report(0, 0)):
            held, largest = _Copy(url, home), SMALL if small else sys.maxsize
            if began < held.asked <= time.time() and held.upto >= largest:
                return place(url)
            try:
                wanted = look(url)
            except StoreError as error:
                if held.upto < largest:
                    raise
                print(f"recycle_pp: {error}; using the copy in {place(url)}", file=sys.stderr, flush=True)
                held.confirm()
            else:
                held.update(wanted, largest, report)
    except OSError as error:
        raise StoreError(f"{url} cannot be copied to {home}: {error.strerror or error}") from None
    return place(url)


def is_copied(url: str, small: bool = False) -> bool:
    """Whether this machine has a complete copy, perhaps an outdated one. Sends no request to the store."""
    return _Copy(url, _home(url)).upto >= (SMALL if small else sys.maxsize)


def copy_apart(urls: Mapping[str, bool]) -> None:
    """Calls `copy` for each URL, in a separate process that ends if this process ends. Raises StoreError like `copy`.

    urls: URL -> `small`"""
    for url, small in urls.items():
        command = [sys.executable, "-m", "recycle_pp.storage.local_copy", "--child", *["--small"] * small, url]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            said = process.stdout.read().strip()
            if process.wait():
                raise StoreError(said or f"{url} could not be fetched: exit code {process.returncode}")


def look(url: str) -> dict[str, Object]:
    """The objects to copy for a URL: path in the folder `files` of the copy -> object. Raises Absent if there are none,
    StoreError if the store fails."""
    above, name = _split(url)
    inside = Store(url, LOOK_SECONDS).objects()  # first, because its errors are clearer than those of other requests
    folders = {str(folder) for path in inside for folder in PurePosixPath(path).parents}
    if inside:  # leaves out the empty objects by which web consoles represent folders
        return {str(PurePosixPath(name, path)): of for path, of in inside.items() if path not in folders}
    if not name:
        raise Absent(f"{url} contains no objects")
    store, stem = Store(above, LOOK_SECONDS), name.removesuffix(".idx").removesuffix(".bin")
    found = {}
    for one in dict.fromkeys((name, f"{stem}.bin", f"{stem}.idx", f"{stem}.bin.json")):
        with suppress(Absent):
            found[one] = store.head(one)
    if name in found and stem == name:
        return {name: found[name]}
    if name in found or {f"{stem}.bin", f"{stem}.idx"} <= found.keys():
        return found
    raise Absent(f"{url} does not exist")


class _Copy:
    """The copy of one URL.

    upto: a size in bytes. The copy contains all objects up to this size, in the versions that `update` last saw
    asked: time (Unix) at which a process last asked the store and then used the copy
    """

    def __init__(self, url: str, home: Path) -> None:
        self._url, self._home, self._record = url, home, home / "copy.json"
        self._objects: dict[str, tuple[int, str]] = {}
        self.upto, self.asked = 0, 0.0
        # A damaged record, for instance after a power failure, counts as missing.
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
            record = json.loads(self._record.read_text())
            of = {name: (size, version) for name, (size, version) in record["objects"].items()}
            self.upto, self.asked, self._objects = int(record["upto"]), float(record.get("asked", 0.0)), of

    def update(self, wanted: Mapping[str, Object], largest: int, report: Report) -> None:
        of = {name: (one.size, one.version) for name, one in wanted.items()}
        kept = {name: known for name, known in self._objects.items() if of.get(name) == known and self._has(name)}
        needed = {name: one for name, one in wanted.items() if name not in kept and one.size <= largest}
        if needed or self._objects != kept:
            stale, self._objects = self._objects.keys() - kept.keys(), kept
            self.write(upto=0)
            for name in stale:
                self._file(name).unlink(missing_ok=True)
            try:
                self._fetch(needed, report)
            finally:
                self.write(upto=0)
            shutil.rmtree(self._home / "partial", ignore_errors=True)
        upto = sys.maxsize if self._objects == of else largest
        if upto == self.upto:
            self.confirm()
        else:
            self.write(upto)

    def _fetch(self, needed: Mapping[str, Object], report: Report) -> None:
        partial = self._home / "partial"
        partial.mkdir(exist_ok=True)
        begun = {name: _Partial(partial, name, one) for name, one in needed.items()}
        kept = sum(size for size, _ in self._objects.values())
        total, done = kept + sum(one.size for one in needed.values()), kept + sum(one.size for one in begun.values())
        missing, free = total - done, shutil.disk_usage(self._home).free
        if missing > free:
            raise StoreError(f"{self._url} needs {missing / 1e9:.2f} GB; {free / 1e9:.2f} GB are free in {self._home}")
        pieces = [
            (name, at, min(PIECE, one.size - at), one.version)
            for name, one in needed.items()
            for at in range(begun[name].size, max(one.size, 1), PIECE)
        ]
        report(done, total)
        above, _ = _split(self._url)
        store, recorded = Store(above), time.monotonic()
        for (name, at, length, _), content in zip(pieces, store.ranges(pieces), strict=True):
            begun[name].add(content)
            done += length
            report(done, total)
            if at + length == needed[name].size:
                begun[name].finish(self._file(name))
                self._objects[name] = (needed[name].size, needed[name].version)
                if time.monotonic() > recorded + RECORD_SECONDS:
                    self.write(upto=0)
                    recorded = time.monotonic()

    def _file(self, name: str) -> Path:
        return self._home / "files" / name

    def _has(self, name: str) -> bool:
        try:
            return self._file(name).stat().st_size == self._objects[name][0]
        except OSError:
            return False

    def confirm(self) -> None:
        """Records that the store was asked. If the disk is full or read-only, the next process asks it again."""
        with suppress(OSError):
            self.write(self.upto)

    def write(self, upto: int) -> None:
        self.upto, self.asked = upto, time.time()
        new = self._record.with_suffix(".new")
        with new.open("w") as file:
            json.dump({"url": self._url, "upto": upto, "asked": self.asked, "objects": self._objects}, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._record)


class _Partial:
    """The first bytes of a file that is being fetched. size: their number.

    If a killed process has left such a file, the constructor keeps only its synced bytes, because the others may be
    wrong after a power failure.
    """

    def __init__(self, folder: Path, name: str, of: Object) -> None:
        self._path = folder / hashlib.sha256(f"{name} {of}".encode()).hexdigest()[:32]
        self._of = of
        self.size = 0
        with suppress(FileNotFoundError):
            self.size = max(0, self._path.stat().st_size - 1) // SYNCED * SYNCED
            os.truncate(self._path, self.size)

    def add(self, content: bytes) -> None:
        with self._path.open("ab") as file:
            file.write(content)
            self.size += len(content)
            if self.size % SYNCED == 0:
                file.flush()
                os.fsync(file.fileno())

    def finish(self, to: Path) -> None:
        if self.size != self._of.size:
            raise OSError(f"{self._path} has {self.size} bytes, expected {self._of.size}")
        with self._path.open("ab") as file:
            os.fsync(file.fileno())
        os.utime(self._path, (self._of.modified, self._of.modified))
        to.parent.mkdir(parents=True, exist_ok=True)
        self._path.replace(to)


def _home(url: str) -> Path:
    return cache_folder("store") / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:32]


def _split(url: str) -> tuple[str, str]:
    """Splits a URL into (URL of the folder, name in this folder); the URL of a bucket into (URL, "")."""
    above, _, name = url.rstrip("/").rpartition("/")
    return (url.rstrip("/"), "") if above.endswith("/") else (above, name)


class ProgressLines:
    """Prints a line of progress every few seconds."""

    def __init__(self, url: str) -> None:
        self._url, self._begun, self._first = url, time.monotonic(), -1
        self._next = self._begun + REPORT_SECONDS

    def show(self, done: int, total: int) -> None:
        now = time.monotonic()
        if total and self._first < 0:
            self._begun, self._first = now, done
        if now < self._next:
            return
        self._next = now + REPORT_SECONDS
        text = f"recycle_pp: waits for another process of this machine to fetch {self._url}"
        if total:
            speed = (done - self._first) / max(now - self._begun, 1e-3)
            left = f", {(total - done) / speed:.0f} s left" if speed else ""
            share = f"{100 * done / total:.1f} % of {total / 1e6:,.1f} MB"
            text = f"recycle_pp: fetches {self._url}: {share}, {speed / 1e6:.1f} MB/s{left}"
        print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recycle_pp.storage.local_copy")
    parser.add_argument("urls", nargs="+", metavar="URL")
    parser.add_argument("--small", action="store_true", help=f"leave out objects above {SMALL >> 20} MiB")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child:
        _end_with(0)
    try:
        for url in arguments.urls:
            copy(url, arguments.small, ProgressLines(url).show)
    except StoreError as error:
        print(error)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _end_with(stdin: int) -> None:
    """Ends this process when the parent process ends, because the parent then no longer holds the pipe open."""
    threading.Thread(target=lambda: os.read(stdin, 1) or os._exit(130), daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
